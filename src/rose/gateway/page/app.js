// The connection to the gateway, the token, orders and tabs.

const KEY = "rose.operator-token", PAUSE_MS = 500, PAUSE_MS_MAX = 5000, SILENCE_MS = 6000;
let token = sessionStorage.getItem(KEY), generation = 0;

class Refused extends Error {}

async function ask(path, options = {}) {
  const response = await fetch(path, {...options, headers: {Authorization: `Bearer ${token}`, "Content-Type": "application/json"}, cache: "no-store"});
  if (response.ok) return response;
  const reply = await response.json().catch(() => null);
  const error = new (response.status === 401 || response.status === 403 ? Refused : Error)(reply?.error?.message ?? `the gateway answered ${response.status}`);
  throw error;
}

const get = async (path) => (await ask(path)).json();

function say(text, kind) {
  byId("status").textContent = text;
  byId("status").className = `pill ${kind}`;
  document.body.classList.toggle("away-now", kind === "away");
}

async function order(action, scope) {
  const count = scope.all ? fleet.rows.size : scope.workers.length, result = byId("order-result");
  if (!count && !scope.all) { result.textContent = "Select workers first."; result.className = "bad"; return; }
  const isOne = !scope.all && count === 1, name = action === "limits" ? "Limit" : action[0].toUpperCase() + action.slice(1);
  const body = {action, ...scope};
  if (action === "limits" || !isOne) {
    const answer = await confirmed(name, action, scope.all ? `all ${counted(count)}, and those that join later` : isOne ? scope.workers[0] : counted(count));
    if (!answer) return;
    if (action === "limits") body.turns_max = answer.turns;
  }
  const began = performance.now();
  try {
    const reply = await (await ask("v1/pool/orders", {method: "POST", body: JSON.stringify(body)})).json();
    const kept = reply.is_durable ? "" : "; it holds until the gateway ends";
    result.textContent = `${name}: ${counted(reply.matched.length)} in ${Math.round(performance.now() - began)} ms${kept}`;
    result.className = "";
  } catch (error) {
    result.textContent = `${name} was not carried out: ${error.message}`;
    result.className = "bad";
  }
}

const MEANING = {
  pause: "They get no turns, and those under way continue elsewhere. The rollout model stays loaded.",
  resume: "They get turns again, unless their owner stopped them on the device.",
  drain: "They get no turns, and serving gets the memory of the rollout model.",
  limits: "At most so many turns run at once on each of them.",
};

function confirmed(name, action, whom) {
  const dialog = byId("ask");
  byId("ask-title").textContent = `${name} ${whom}?`;
  byId("ask-what").textContent = MEANING[action];
  byId("ask-turns-line").hidden = action !== "limits";
  byId("ask-turns").value = "";
  byId("ask-yes").textContent = name;
  dialog.returnValue = "";
  dialog.showModal();
  byId(action === "limits" ? "ask-turns" : "ask-yes").focus();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    const turns = Number.parseInt(byId("ask-turns").value, 10);
    resolve(dialog.returnValue === "yes" ? {turns: turns >= 1 ? turns : null} : null);
  }, {once: true}));
}

const fleet = new Fleet(order), training = new Training(), trajectoryView = new TrajectoryView(get);

function take(event) {
  byId("model").textContent = event.pool.model;
  fleet.take(event);
  training.take(event);
}

// Reads events until the connection ends. A gateway that is silent for long is gone.
async function read(mine) {
  const leave = new AbortController();
  const response = await ask("ui/events", {signal: leave.signal});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  say("live", "live");
  show(true);
  for (;;) {
    const timer = setTimeout(() => leave.abort(), SILENCE_MS);
    const {done, value} = await reader.read().finally(() => clearTimeout(timer));
    if (mine !== generation) { leave.abort(); return; }
    if (done) throw new Error("the stream ended");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
  }
}

async function stay() {
  const mine = ++generation;
  for (let pause = PAUSE_MS; mine === generation;) {
    const began = performance.now();
    try {
      await read(mine);
    } catch (error) {
      if (mine !== generation) return;
      if (error instanceof Refused) { forget(error.message); return; }
      if (performance.now() - began > PAUSE_MS_MAX) pause = PAUSE_MS;
      say("the gateway does not answer; trying again", "away");
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(PAUSE_MS_MAX, 2 * pause);
    }
  }
}

function show(isInside) {
  byId("gate").hidden = isInside;
  byId("inside").hidden = !isInside;
  byId("leave").hidden = !isInside;
}

function forget(reason = "") {
  generation += 1;
  token = null;
  sessionStorage.removeItem(KEY);
  fleet.take({is_full: true, columns: [], rows: [], gone: [], now_s: 0, pool: {orders: []}});
  byId("trajectory").replaceChildren();
  byId("trajectory-rows").replaceChildren();
  byId("model").textContent = "";
  byId("gate-error").textContent = reason;
  say("not connected", "");
  show(false);
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) { byId("gate-error").textContent = "A token has plain characters and no spaces."; return; }
  byId("token").value = "";
  byId("gate-error").textContent = "";
  sessionStorage.setItem(KEY, token);
  say("connecting", "");
  stay();
});
byId("leave").addEventListener("click", () => forget());

const tabs = [...document.querySelectorAll("[role=tab]")];
function choose(tab) {
  for (const one of tabs) {
    one.ariaSelected = String(one === tab);
    one.tabIndex = one === tab ? 0 : -1;
    byId(one.getAttribute("aria-controls")).hidden = one !== tab;
  }
  if (tab.id === "tab-fleet") fleet.draw();
  if (tab.id === "tab-trajectories") trajectoryView.refresh().catch(() => {});
}
tabs.forEach((tab, place) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = tabs[(place + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
});
setInterval(() => {
  if (token && !byId("trajectories").hidden) trajectoryView.refresh().catch(() => {});
}, 3000);

if (token) { say("connecting", ""); stay(); } else show(false);
