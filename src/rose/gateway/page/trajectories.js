// The trajectories view: a list, and one of them with its tokens coloured by the version of the weights.

class TrajectoryView {
  constructor(get) {
    Object.assign(this, {get, chosen: null, colours: new Map()});
  }

  async refresh() {
    const reply = await this.get("ui/trajectories");
    byId("trajectories-note").textContent = reply.trajectories.length
      ? `The newest ${whole(reply.trajectories.length)}; the gateway holds ${whole(reply.total)} open or not yet handed out.`
      : "The gateway holds no trajectory now.";
    byId("trajectory-rows").replaceChildren(...reply.trajectories.map((row) => {
      const name = make("button", {type: "button", className: "link", textContent: row.id});
      name.addEventListener("click", () => { this.chosen = row.id; this.open().catch(() => {}); });
      const cells = [row.running ? "running" : row.state, whole(row.turns), whole(row.tokens), row.reward == null ? "" : String(row.reward)];
      return make("tr", {className: row.id === this.chosen ? "chosen" : ""}, make("td", {title: row.task}, name),
        ...cells.map((text, place) => make("td", {textContent: text, className: place ? "number" : ""})));
    }));
    if (this.chosen) await this.open();
  }

  colour(version) {
    if (!this.colours.has(version)) this.colours.set(version, `v${this.colours.size % 8}`);
    return this.colours.get(version);
  }

  async open() {
    const found = await this.get(`ui/trajectories/${encodeURIComponent(this.chosen)}`);
    const {summary, turns} = found, parts = [make("h2", {textContent: summary.id})];
    const facts = make("dl", {className: "facts"}), migrations = this.migrations(turns);
    fillFacts(facts, [
      ["Group", summary.group || "none"], ["Task", summary.task || "none"], ["State", summary.running ? "running" : summary.state],
      ["Reward", summary.reward == null ? "none yet" : String(summary.reward)], ["Turns", whole(summary.turns)],
      ["Generated tokens", whole(summary.tokens)], ["Migrations within turns", migrations == null ? "not kept for finished groups" : whole(migrations)],
    ]);
    const versions = [...new Set(turns.flatMap((turn) => turn.segments.map((segment) => segment.version)).filter(Boolean))];
    const legend = make("p", {className: "legend"}, "Weight versions: ", ...versions.map((version) => make("span", {className: this.colour(version), textContent: version})));
    parts.push(facts, ...(versions.length ? [legend] : []));
    for (const turn of turns) {
      const where = turn.workers.length ? `on ${turn.workers.join(", then ")}` : "";
      const end = turn.is_running ? "running" : turn.finish_reason ?? "given up";
      const fork = turn.parent == null && turn.ordinal > 0 ? "; a new branch" : "";
      const words = turn.segments.map((segment) => make("span", {
        className: segment.version ? this.colour(segment.version) : "prompt", textContent: segment.text,
        title: segment.version ? `${segment.tokens} tokens, version ${segment.version}` : `${segment.tokens} tokens of the prompt`,
      }));
      parts.push(make("section", {className: "turn"},
        make("h3", {textContent: `Turn ${turn.ordinal + 1} ${where} (${end}${fork})`}), make("div", {className: "tokens"}, ...words)));
    }
    if (found.is_cut) parts.push(make("p", {className: "soft", textContent: "Only the first tokens are shown."}));
    byId("trajectory").replaceChildren(...parts);
  }

  migrations(turns) {
    if (turns.length && turns.every((turn) => !turn.workers.length)) return null;
    return turns.reduce((total, turn) => total + Math.max(0, turn.workers.length - 1), 0);
  }
}
