/* Tabs, tiles, workers and keys; everything is drawn from `state`. */

const state = { runs: [], active: null, smoothing: 0, view: "overview" };
const views = ["overview", "samples", "settings"];
let parts = null, waiting = false;

function changed() {
  if (waiting) return;
  waiting = true;  // several runs report at about the same time
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function draw() {
  state.runs = source.runs;
  if (!state.runs.includes(state.active)) state.active = state.runs[0];
  parts = parts || { charts: new Charts(), distributions: new Distributions(), samples: new Samples(), settings: new SettingTable() };
  document.title = state.runs.map((run) => run.name).join(", ") + " · Paceline";
  drawRuns();
  if (state.view === "overview") {
    drawTiles();
    drawWorkers();
    parts.charts.update();
    parts.distributions.update();
  } else parts[state.view].update();
  document.body.dataset.ready = "true";
}

function drawRuns() {
  $("runs").replaceChildren(...state.runs.map((run, index) => {
    const target = Number(run.config.steps), step = lastOf(run.metrics.step) || 0;
    const progress = target && target !== step ? `${step} of ${target}` : `${step} steps`;
    return element("button", { class: "run", type: "button", title: run.path, "aria-pressed": run === state.active ? "true" : "false",
      onclick: () => { state.active = run; draw(); } },
    element("span", { class: "dot", color: runColor(index) }), element("b", {}, shown(run.name)),
    element("span", { class: `quiet state-${run.state}` }, run.state), element("span", { class: "quiet" }, progress));
  }));
  const thinned = Math.max(...state.runs.map((run) => run.thinned || 1));
  $("thinned").textContent = thinned > 1 ? `Each point is the mean of ${thinned} steps.` : "";
}

/* The tenth of the steps at the end, as in the run summary. */
function recent(column) {
  const known = (column || []).filter((value) => value !== null);
  if (!known.length) return null;
  const last = known.slice(-Math.max(1, Math.floor(known.length / 10)));
  return last.reduce((a, b) => a + b, 0) / last.length;
}

function drawTiles() {
  const run = state.active, metrics = run.metrics, time = metrics["wall_time_s"] || [];
  const rate = tokenRate(metrics).rate, passed = time.length > 1 ? time.at(-1) - time[0] : null;
  const first = (metrics["reward/mean"] || []).find((value) => value !== null);
  const evaluation = run.evaluations.at(-1);
  const dropped = ["queue/dropped", "rollout/failed_groups", "train/skipped_groups"].reduce((sum, name) => sum + (lastOf(metrics[name]) || 0), 0);
  const tiles = [
    ["Steps", number(lastOf(metrics.step)), run.config.steps ? `of ${number(Number(run.config.steps))}` : ""],
    ["Reward", number(recent(metrics["reward/mean"]), 3), first === undefined ? "" : `from ${number(first, 3)}`],
    evaluation ? ["Evaluation", number(evaluation.reward, 3), `step ${evaluation.step}`] : null,
    metrics["reward/mean"] ? null : ["Loss", number(recent(metrics["train/loss"]), 3), "in the last steps"],
    ["Tokens/s", number(recent(rate), 3), "in the last steps"],
    ["Time per step", seconds(passed === null ? null : passed / Math.max(1, lastOf(metrics.step) - metrics.step[0])), passed === null ? "" : `${seconds(passed)} in all`],
    metrics["staleness/mean"] ? ["Staleness", number(recent(metrics["staleness/mean"]), 3), `max ${number(metrics["staleness/max"].reduce((a, b) => Math.max(a, b), 0))}`] : null,
    metrics["time/sync_s"] ? ["Weight sync", seconds(recent(metrics["time/sync_s"])), "per step"] : null,
    metrics["queue/dropped"] ? ["Dropped groups", number(dropped), "not trained"] : null,
    metrics["fleet/engines"] ? ["Engines", number(lastOf(metrics["fleet/engines"])), `${number(lastOf(metrics["fleet/replaced"]) || 0)} replaced`] : null,
  ].filter(Boolean);
  $("tiles").replaceChildren(...tiles.map(([title, value, note]) => element("div", { class: "tile" },
    element("span", { class: "quiet" }, title), element("span", { class: "value" }, value), element("span", { class: "quiet" }, note))));
}

function drawWorkers() {
  const run = state.active, columns = ["name", "node", "state", "version", "load", "tokens_per_s", "incarnation"];
  $("workers-run").textContent = run.workers.length ? run.name : run.state === "running" ? "no reply yet" : "listed while the run is active";
  $("workers").replaceChildren();
  if (run.workers.length) {
    const tone = (value) => ({ live: "good", dead: "bad" })[value] || "wait";
    const numeric = (name) => (columns.indexOf(name) > 2 ? "number" : null);
    $("workers").append(element("div", { class: "scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { class: numeric(name) }, name.replaceAll("_", " ").replace("tokens per s", "tokens/s"))))),
      element("tbody", {}, ...run.workers.map((worker) => element("tr", {}, ...columns.map((name) => element("td",
        { class: name === "state" ? tone(worker.state) : numeric(name) }, typeof worker[name] === "number" ? number(worker[name]) : shown(worker[name])))))))));
  }
  $("warnings").hidden = !run.warnings.length;
  $("warnings").querySelector("summary").textContent = `Warnings (${run.warnings.length})`;
  $("warnings").querySelector("pre").replaceChildren(shown(run.warnings.join("\n")));
}

function show(view) {
  state.view = view;
  for (const name of views) {
    $(name).hidden = name !== view;
    $(`tab-${name}`).setAttribute("aria-selected", name === view ? "true" : "false");
    $(`tab-${name}`).tabIndex = name === view ? 0 : -1;
  }
  if (parts) history.replaceState(null, "", `#/${view}`);
  if (parts) draw();
}

function onKey(event) {
  const typing = event.target.closest("input:not([type=range]):not([type=checkbox]), select");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    if (typing) typing.blur();
    if (state.view === "samples") parts.samples.clear();
    return;
  }
  if (typing) return;
  if (event.target.closest("nav") && ["ArrowLeft", "ArrowRight"].includes(event.key)) {
    const next = views[(views.indexOf(state.view) + (event.key === "ArrowRight" ? 1 : 2)) % 3];
    show(next);
    $(`tab-${next}`).focus();
    return;
  }
  const act = {
    "/": () => { show("samples"); $("search").focus(); },
    1: () => show("overview"), 2: () => show("samples"), 3: () => show("settings"),
    ...(state.view === "samples" ? {
      ArrowDown: () => parts.samples.move(1), j: () => parts.samples.move(1),
      ArrowUp: () => parts.samples.move(-1), k: () => parts.samples.move(-1),
      ArrowRight: () => parts.samples.moveStep(1), ArrowLeft: () => parts.samples.moveStep(-1),
      c: () => parts.samples.nextColoring(),
    } : {}),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

document.querySelectorAll("nav button").forEach((tab) => tab.addEventListener("click", () => show(tab.dataset.view)));
document.addEventListener("keydown", onKey);
$("smoothing").addEventListener("input", () => { state.smoothing = Number($("smoothing").value); parts.charts.update(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (parts) { parts.charts.restyle(); draw(); } });
show(views.find((view) => location.hash === `#/${view}`) || "overview");
source.start(changed).catch((error) => {
  $("problem").hidden = false;
  $("problem").textContent = `The data cannot be read: ${error.message}`;
});
