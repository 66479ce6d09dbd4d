// The table of workers. Only the rows in view exist as elements, so a thousand workers scroll as smoothly as ten.

const ROW_PX = 34, KEPT = 300;
const HEADS = [
  ["name", "Worker"], ["kind", "Kind"], ["state", "State"], ["turns", "Turns", 1], ["tokens_per_s", "Tokens/s", 1],
  ["version", "Version"], ["ttft_p50_s", "First token P50", 1], ["ttft_p99_s", "First token P99", 1],
  ["tpot_p99_s", "Later tokens P99", 1], ["lent_share", "Lent", 1], ["counted", "Lost to lending", 1],
  ["ambiguous", "Perhaps lost", 1], ["breaker_trips", "Breaker"], ["labels", "Labels"],
];

class Fleet {
  constructor(order) {
    Object.assign(this, {order, rows: new Map(), shown: [], selected: new Set(), sort: "name", isDown: false, history: new Map(), one: null});
    const all = make("input", {type: "checkbox", ariaLabel: "Select all workers that are shown"});
    all.addEventListener("change", () => {
      this.shown.forEach((row) => all.checked ? this.selected.add(row.name) : this.selected.delete(row.name));
      this.draw();
    });
    const heads = HEADS.map(([key, title, isNumber]) => {
      const button = make("button", {type: "button", textContent: title});
      button.addEventListener("click", () => { this.isDown = this.sort === key && !this.isDown; this.sort = key; this.arrange(); });
      const head = make("th", {scope: "col", className: isNumber ? "number" : ""}, button);
      head.dataset.key = key;
      return head;
    });
    const row = make("tr", {}, make("th", {scope: "col"}, all), heads[0], make("th", {scope: "col", textContent: "Orders"}), ...heads.slice(1));
    document.querySelector("#workers thead").append(row);
    byId("filter").addEventListener("input", () => this.arrange());
    byId("scroller").addEventListener("scroll", () => this.draw(), {passive: true});
    // A row that is replaced between pressing and releasing a button would lose the click.
    byId("scroller").addEventListener("pointerdown", () => { this.isPressed = true; });
    for (const name of ["pointerup", "pointercancel"])
      window.addEventListener(name, () => setTimeout(() => { this.isPressed = false; }));
    for (const button of document.querySelectorAll("[data-action]"))
      button.addEventListener("click", () => this.order(button.dataset.action, this.scope()));
    this.charts = [
      new Chart(byId("one-charts"), "First token", ["P50", "P99"], ms), new Chart(byId("one-charts"), "Lent time", ["share"], share),
      new Chart(byId("one-charts"), "Rollouts", ["tokens/s"], whole),
    ];
  }

  take(event) {
    if (event.is_full) { this.rows.clear(); this.columns = event.columns; }
    for (const cells of event.rows) {
      const row = Object.fromEntries(this.columns.map((name, place) => [name, cells[place]]));
      this.rows.set(row.name, row);
    }
    for (const name of event.gone) { this.rows.delete(name); this.selected.delete(name); this.history.delete(name); }
    for (const row of this.rows.values()) {
      const past = this.history.get(row.name) ?? [];
      past.push([event.now_s, row.ttft_p50_s, row.ttft_p99_s, row.lent_share, row.tokens_per_s, row.ttft_budget_s]);
      if (past.length > KEPT) past.shift();
      this.history.set(row.name, past);
    }
    this.summarise(event.pool);
    this.arrange();
  }

  summarise(pool) {
    const rows = [...this.rows.values()];
    const count = (test) => rows.filter(test).length;
    const sum = (key) => rows.reduce((total, row) => total + row[key], 0);
    const lent = rows.filter((row) => row.lent_share != null);
    fill(byId("fleet-tiles"), [
      ["Workers", whole(rows.length)], ["Borrowed devices", whole(count((row) => row.kind === "borrowed"))],
      ["Open for turns", whole(count((row) => row.state === "open"))],
      ["Paused or drained", whole(count((row) => row.ordered !== "lending"))],
      ["Turns", whole(sum("turns"))], ["Rollout tokens/s", whole(sum("tokens_per_s"))],
      ["Lent time", lent.length ? share(lent.reduce((total, row) => total + row.lent_share, 0) / lent.length) : "?"],
      ["P99 over budget", `${whole(count((row) => row.ttft_p99_s > row.ttft_budget_s && row.ttft_budget_s != null))} of ${whole(count((row) => row.ttft_p99_s != null))}`],
      ["Lost to lending", `${whole(sum("counted"))}, perhaps ${whole(sum("ambiguous"))} more`],
      ["Breaker rests", whole(count((row) => row.is_resting))],
    ]);
    const lines = pool.orders.slice().reverse().map((order) => make("li", {
      textContent: `${order.at.replace("T", " ").slice(0, 19)} UTC: ${order.action}${order.action === "limits" ? ` (${order.turns_max ?? "no limit"})` : ""}, ${order.target}: ${counted(order.matched)}`,
    }));
    byId("orders").replaceChildren(...(lines.length ? lines : [make("li", {textContent: "none so far"})]));
  }

  arrange() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => `${row.name} ${row.kind} ${row.state} ${row.version} ${row.labels} ${row.why}`.toLowerCase();
    this.shown = [...this.rows.values()].filter((row) => !words.length || words.every((word) => text(row).includes(word)));
    const sign = this.isDown ? -1 : 1, key = this.sort;
    const compare = (a, b) => (a[key] ?? -1) < (b[key] ?? -1) ? -sign : (a[key] ?? -1) > (b[key] ?? -1) ? sign : a.name < b.name ? -1 : 1;
    this.shown.sort(compare);
    for (const head of document.querySelectorAll("#workers thead th[data-key]"))
      head.ariaSort = head.dataset.key === key ? (this.isDown ? "descending" : "ascending") : "none";
    this.draw();
  }

  draw() {
    if (this.isPressed) return;
    const scroller = byId("scroller"), table = byId("workers");
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_PX) - 5);
    const shown = this.shown.slice(first, first + Math.ceil(scroller.clientHeight / ROW_PX) + 12);
    table.ariaRowCount = String(this.shown.length + 1);
    const space = (id, rows) => {
      const cell = make("td", {colSpan: HEADS.length + 2});
      cell.style.height = `${rows * ROW_PX}px`;
      byId(id).replaceChildren(make("tr", {}, cell));
    };
    const active = document.activeElement, focus = active?.dataset?.focus;
    space("space-before", first);
    byId("rows").replaceChildren(...shown.map((row, place) => this.row(row, first + place + 2)));
    space("space-after", Math.max(0, this.shown.length - first - shown.length));
    if (focus) document.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus({preventScroll: true});
    byId("nothing").hidden = this.shown.length > 0;
    byId("scope").options[0].textContent = `selected workers (${this.selected.size})`;
    byId("scope").options[1].textContent = `workers shown here (${this.shown.length})`;
    this.drawOne();
  }

  row(row, index) {
    const box = make("input", {type: "checkbox", checked: this.selected.has(row.name), ariaLabel: `Select ${row.name}`});
    box.dataset.focus = `box ${row.name}`;
    box.addEventListener("change", () => { box.checked ? this.selected.add(row.name) : this.selected.delete(row.name); this.draw(); });
    const name = make("button", {type: "button", className: "link", textContent: row.name});
    name.dataset.focus = `name ${row.name}`;
    name.addEventListener("click", () => { this.one = this.one === row.name ? null : row.name; this.draw(); });
    const against = (value, budget) => value == null ? "" : budget == null ? ms(value) : `${ms(value)} of ${ms(budget)}`;
    const over = (value, budget) => value != null && budget != null && value > budget ? " over" : "";
    const cell = (text, className = "", title = "") => make("td", {textContent: text, className, title});
    const isServing = row.ttft_budget_s != null || row.requests > 0;
    const orders = make("td");
    for (const action of row.ordered === "lending" ? ["pause", "drain"] : ["resume"]) {
      const button = make("button", {type: "button", textContent: action[0].toUpperCase() + action.slice(1), ariaLabel: `${action} ${row.name}`});
      button.dataset.focus = `${action} ${row.name}`;
      button.addEventListener("click", () => this.order(action, {workers: [row.name]}));
      orders.append(button);
    }
    const line = make("tr", {ariaRowIndex: String(index), className: this.selected.has(row.name) ? "chosen" : ""},
      make("td", {}, box), make("td", {}, name), orders, cell(row.kind), cell(row.state, `state-${row.state}`, row.why),
      cell(`${row.turns} / ${row.turns_max}`, "number"), cell(whole(row.tokens_per_s), "number"), cell(row.lag > 0 && row.version ? `${row.version} (${row.lag} behind)` : row.version),
      cell(row.ttft_p50_s == null ? "" : ms(row.ttft_p50_s), "number"), cell(against(row.ttft_p99_s, row.ttft_budget_s), "number" + over(row.ttft_p99_s, row.ttft_budget_s)),
      cell(against(row.tpot_p99_s, row.tpot_budget_s), "number" + over(row.tpot_p99_s, row.tpot_budget_s)), cell(row.lent_share == null ? "" : share(row.lent_share), "number"),
      cell(isServing ? whole(row.counted) : "", "number" + (row.counted ? " over" : "")), cell(isServing ? whole(row.ambiguous) : "", "number"),
      cell(!isServing ? "" : row.is_resting ? `rests (${row.breaker_trips})` : row.breaker_trips ? `${row.breaker_trips} trips` : "ok", row.is_resting ? "warn" : ""),
      cell(row.labels));
    line.dataset.worker = row.name;
    return line;
  }

  drawOne() {
    const row = this.rows.get(this.one);
    byId("one").hidden = !row;
    if (!row) return;
    byId("one-title").textContent = row.name;
    fillFacts(byId("one-facts"), [
      ["State", row.why ? `${row.state}: ${row.why}` : row.state], ["Ordered", row.ordered], ["Rollout model", row.place],
      ["Turns", `${row.turns} of at most ${row.turns_max}, ${whole(row.turns_ended)} ended`],
      ["Users", `${whole(row.requests)} requests lately`], ["KV memory of serving", share(row.kv_use)],
    ]);
    const past = this.history.get(row.name) ?? [], column = (place) => past.map((sample) => sample[place]);
    this.charts[0].show(column(0), [column(1), column(2)], row.ttft_budget_s);
    this.charts[1].show(column(0), [column(3)]);
    this.charts[2].show(column(0), [column(4)]);
  }

  scope() {
    const kind = byId("scope").value;
    if (kind === "all") return {all: true};
    return {workers: kind === "shown" ? this.shown.map((row) => row.name) : [...this.selected]};
  }
}
