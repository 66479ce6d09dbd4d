// The training view: what the gateway knows of versions, batches, groups and throughput.

class Training {
  constructor() {
    this.past = [];
    const parent = byId("training-charts");
    this.speed = new Chart(parent, "Generated tokens per second", ["dedicated", "borrowed"], whole);
    this.turns = new Chart(parent, "Turns", ["running", "waiting"], whole);
  }

  take(event) {
    const pool = event.pool, counts = pool.counts;
    this.past.push([event.now_s, pool.tokens_per_s.dedicated, pool.tokens_per_s.borrowed, pool.running, pool.waiting]);
    if (this.past.length > 600) this.past.shift();
    const column = (place) => this.past.map((sample) => sample[place]);
    fill(byId("training-tiles"), [
      ["Newest version", pool.version ?? "none yet"], ["Versions published", whole(pool.versions)],
      ["Batches taken", whole(pool.last_batch)], ["Groups complete, not taken", whole(pool.complete_groups)],
      ["Trajectories held", whole(pool.trajectories)], ["Trajectories finished", whole(pool.finished)],
      ["Slowest weight sync", pool.sync_s == null ? "?" : `${pool.sync_s.toFixed(2)} s`], ["Generated tokens", whole(counts.tokens)],
    ]);
    this.speed.show(column(0), [column(1), column(2)]);
    this.turns.show(column(0), [column(3), column(4)]);
    const total = Object.values(pool.staleness).reduce((sum, count) => sum + count, 0);
    const bars = Object.entries(pool.staleness).flatMap(([lag, count]) => [
      make("span", {textContent: lag === "0" ? "newest" : `${lag} behind`}),
      make("meter", {min: 0, max: total, value: count, ariaLabel: `${count} workers are ${lag} versions behind`}),
      make("span", {textContent: whole(count)}),
    ]);
    byId("staleness").replaceChildren(make("div", {className: "bars"}, ...bars));
    fillFacts(byId("counts"), Object.entries(counts).filter(([name]) => name !== "tokens").map(([name, count]) => [name.replace("_", " "), whole(count)]));
  }
}
