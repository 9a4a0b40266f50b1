/* Line charts over steps: one color per run, one dash pattern per metric. */

const TIME_PARTS = ["time/wait_s", "time/train_s", "time/sync_s", "time/evaluate_s", "time/validation_s", "time/save_s"];
/* Parts of the device-time ledger in the chart, with the metrics that each adds up. */
const DEVICE_PARTS = {
  generation: ["generation"], underfilled: ["underfilled"], prefill: ["prefill"], training: ["training"],
  sync: ["sync", "wait_sync"], reward: ["reward", "wait_reward"],
  "evaluation, checkpoint": ["evaluation", "wait_evaluation", "checkpoint", "wait_checkpoint"], wasted: ["wasted"],
  "waiting for groups": ["wait_groups"], "waiting for tickets": ["wait_tickets"],
  other: ["switching", "wait_restart", "wait_other"],
};
const SECTIONS = [
  ["Learning", [
    { title: "Reward", names: ["reward/mean"] },
    { title: "Evaluation", evaluation: true },
    { title: "Loss", names: ["train/loss", "validation/loss"] },
    { title: "Entropy", names: ["train/entropy"] },
    { title: "Gradient norm", names: ["train/grad_norm"] },
    { title: "KL to the sampling policy", names: ["train/kl", "train/mismatch_kl"] },
    { title: "KL to the teacher", names: ["distill/kl"] },
    { title: "Reward components", prefix: "reward_component/" },
    { title: "Completion length", names: ["rollout/length_mean"] },
    { title: "Fractions", names: ["reward/uniform_group_fraction", "rollout/truncated_fraction", "train/clip_fraction"], format: percent },
  ]],
  ["Speed", [
    { title: "Time per step", names: TIME_PARTS, stacked: true, format: seconds },
    { title: "Device time", derive: deviceShares, names: Object.keys(DEVICE_PARTS), stacked: true, format: percent },
    { title: "Speed of light", names: ["device/speed_of_light"], format: percent },
    { title: "Trained tokens per second", derive: tokenRate, names: ["rate"] },
    { title: "Staleness", names: ["staleness/mean", "staleness/max"] },
    { title: "Queue utilization", names: ["queue/utilization"], format: percent },
    { title: "Weight sync", names: ["time/sync_s"], format: seconds },
    { title: "Sample age", names: ["sample_age_s"], format: seconds },
    { title: "Engines", names: ["fleet/engines", "fleet/replaced"] },
    { title: "Dropped, failed and skipped groups", names: ["queue/dropped", "rollout/failed_groups", "train/skipped_groups"], nonzero: true },
  ]],
];
const DASHES = [[], [5, 4], [2, 3], [8, 3, 2, 3], [1, 4]];
const SYNC = uPlot.sync("steps");
const label = (name) => name.replace(/^[a-z_]+\//, "").replace(/_(s|fraction)$/, "").replaceAll("_", " ");

/* Fractions of the device time of each step. */
function deviceShares(metrics) {
  const total = metrics["device/total_s"];
  if (!total) return {};
  return Object.fromEntries(Object.entries(DEVICE_PARTS).map(([part, names]) => {
    const columns = names.map((name) => metrics[`device/${name}_s`]).filter(Boolean);
    return [part, total.map((all, at) => (all ? columns.reduce((sum, column) => sum + (column[at] || 0), 0) / all : null))];
  }));
}

/* Tokens of a step per second since the step before. */
function tokenRate(metrics) {
  const time = metrics["wall_time_s"], tokens = metrics["rollout/tokens"] || metrics["train/tokens"];
  if (!time || !tokens) return {};
  const points = metrics.step.length;  // the last one may have fewer steps
  const thinned = points > 2 ? (metrics.step.at(-2) - metrics.step[0]) / (points - 2) : 1;
  return { rate: tokens.map((count, at) => {
    const passed = at ? time[at] - time[at - 1] : 0;
    return count === null || passed <= 0 ? null : (count * thinned) / passed;
  }) };
}

/* A color halfway to the background: there are six colors. It is opaque, as areas of a stack overlap. */
function faded(color) {
  const parts = (hex) => (hex.length < 7 ? [...hex.slice(1)].map((digit) => digit + digit) : hex.slice(1).match(/../g)).map((pair) => parseInt(pair, 16));
  const back = parts(style("--card"));
  return `rgb(${parts(color).map((value, at) => Math.round((value + back[at]) / 2)).join(", ")})`;
}

function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.values = element("span", { class: "values" });
    this.plot = element("div", { class: "plot" });
    this.root = element("figure", { class: spec.stacked ? "chart stacked" : "chart", "data-title": spec.title },
      element("figcaption", {}, spec.title, this.values), this.plot);
    this.lines = [];
    new ResizeObserver(() => this._resize()).observe(this.plot);
  }

  /* Draw the runs that have data; return whether any has. */
  update(runs, active, smoothing) {
    const lines = [], tables = [];
    for (const [index, run] of runs.entries()) {
      if (this.spec.stacked && run !== active) continue;
      const { steps, columns } = this._columns(run);
      // Several runs with several lines each are hard to read, so the first metric stands for all.
      const drawn = Object.entries(columns).slice(0, runs.length > 1 && !this.spec.stacked && !this.spec.prefix ? 1 : undefined);
      if (!drawn.length) continue;
      tables.push([steps, ...this._series(drawn, index, smoothing, lines, runs.length > 1)]);
    }
    this.root.hidden = !lines.length;
    if (!lines.length) return false;
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const shape = JSON.stringify(lines.map((line) => [line.label, line.stroke]));
    if (this.chart && shape === this.shape) this.chart.setData(data, !this.zoomed);
    else this._make(data, lines);
    this.shape = shape;
    this.lines = lines;
    this._show(null);
    return true;
  }

  _columns(run) {
    const metrics = this.spec.derive ? this.spec.derive(run.metrics) : run.metrics;
    if (this.spec.evaluation) {
      const names = ["reward", "pass@1"].filter((name) => run.evaluations.some((row) => name in row));
      const columns = Object.fromEntries(names.map((name) => [name, run.evaluations.map((row) => row[name] ?? null)]));
      if (columns.reward && String(columns.reward) === String(columns["pass@1"])) delete columns["pass@1"];
      return { steps: run.evaluations.map((row) => row.step), columns };
    }
    const names = this.spec.prefix ? Object.keys(metrics).filter((name) => name.startsWith(this.spec.prefix)) : this.spec.names;
    const known = names.filter((name) => metrics[name] && metrics[name].some((value) => value !== null));
    const used = known.filter((name) => (!this.spec.nonzero && (known.length === 1 || names[0] === name)) || metrics[name].some((value) => value));
    return { steps: run.metrics.step, columns: Object.fromEntries(used.map((name) => [name, metrics[name]])) };
  }

  _series(drawn, index, smoothing, lines, several) {
    const run = state.runs[index], made = [];
    let below = null;
    for (const [at, [name, values]] of drawn.entries()) {
      const own = this.spec.stacked || (!several && drawn.length > 1);
      const color = own ? (at >= 6 && this.spec.stacked ? faded(runColor(at)) : runColor(at)) : runColor(index);
      const text = [several && !this.spec.stacked ? run.name : "", drawn.length > 1 ? label(name) : ""].filter(Boolean).join(" ");
      const line = { label: text, stroke: color, width: 1.6, raw: values, dash: DASHES[(several ? at : Math.floor(at / 6)) % DASHES.length] };
      if (this.spec.stacked) {
        below = values.map((value, step) => (value || 0) + (below ? below[step] : 0));
        lines.unshift({ ...line, fill: color, width: 0, stacked: true });
        made.unshift(below);
        continue;
      }
      if (smoothing && !this.spec.evaluation) {
        lines.push({ ...line, label: `${text} raw`, stroke: color + "40", width: 1, hidden: true });
        made.push(values);
      }
      lines.push({ ...line, dots: this.spec.evaluation || values.length < 3 });
      made.push(smoothing && !this.spec.evaluation ? smoothed(values, smoothing) : values);
    }
    return made;
  }

  _make(data, lines) {
    if (this.chart) this.chart.destroy();
    this.zoomed = false;
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const format = this.spec.format || ((value) => number(value, 3));
    this.chart = new uPlot({
      ...this._size(), padding: [8, 16, 0, 0], legend: { show: false },
      cursor: { sync: { key: SYNC.key, setSeries: false }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (u, low, high) => this._range(low, high) } },
      axes: [{ ...axis, size: 24, gap: 4, space: 60 }, { ...axis, size: 52, gap: 4, space: 32, values: (u, ticks) => ticks.map(format) }],
      series: [{}, ...lines.map((line) => ({ label: line.label, stroke: line.stroke, fill: line.fill, width: line.width,
        dash: line.dash, spanGaps: true, points: { show: Boolean(line.dots), size: 5 } }))],
      hooks: {
        setCursor: [(u) => this._show(u.cursor.idx)],
        setSelect: [(u) => { if (u.select.width > 2) this.zoomed = true; }],
      },
    }, data, this.plot);
    this.chart.over.addEventListener("dblclick", () => { this.zoomed = false; });
  }

  _range(low, high) {
    if (low === null || low === undefined) return [0, 1];
    if (this.spec.stacked) return [0, high * 1.05 || 1];
    if (low >= 0 && (low < high * 0.6 || low === high)) low = 0;
    const room = (high - low || Math.abs(high) || 1) * 0.07;
    return [low === 0 ? 0 : low - room, high + room];
  }

  /* Values of a point, or the last ones, beside the title. */
  _show(at) {
    const format = this.spec.format || ((value) => number(value, 3));
    const kept = this.lines.map((line, index) => [line, index]).filter(([line]) => !line.hidden);
    if (this.spec.stacked) kept.reverse();
    this.values.replaceChildren(...kept.map(([line, index]) => {
      const column = this.chart.data[index + 1];
      const value = line.stacked ? (at === null || at === undefined ? lastOf(line.raw) : line.raw[at])
        : at === null || at === undefined ? lastOf(column) : column[at];
      return element("i", {}, kept.length > 1 ? element("span", { class: "key", color: line.stroke }) : null,
        line.label ? `${line.label} ` : "", element("b", {}, format(value ?? null)));
    }));
    if (this.spec.stacked && state.runs.length > 1) this.values.prepend(element("i", {}, shown(state.active.name)));
    if (at !== null && at !== undefined) this.values.prepend(element("i", {}, `step ${this.chart.data[0][at]}`));
  }

  _size() { return { width: Math.max(200, this.plot.clientWidth), height: 168 }; }
  _resize() { if (this.chart && this.plot.clientWidth) this.chart.setSize(this._size()); }
  restyle() { this.shape = ""; }
}

/* Sections of charts, and the charts of single metrics. */
class Charts {
  constructor() {
    this.sections = SECTIONS.map(([title, specs]) => {
      const charts = specs.map((spec) => new Chart(spec));
      const root = element("div", {}, element("h2", {}, title), element("div", { class: "grid" }, ...charts.map((chart) => chart.root)));
      $("charts").append(root);
      return { root, charts };
    });
    this.single = new Map();
    $("more").addEventListener("toggle", () => this.more());
    $("metric-filter").addEventListener("input", () => this.more());
  }

  update() {
    for (const { root, charts } of this.sections) {
      root.hidden = !charts.map((chart) => chart.update(state.runs, state.active, state.smoothing)).some(Boolean);
    }
    this.more();
  }

  more() {
    if (!$("more").open) return;
    const wanted = $("metric-filter").value.toLowerCase();
    const names = [...new Set(state.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
    for (const name of names) {
      if (name === "step" || name === "wall_time_s") continue;
      if (!this.single.has(name)) {
        const chart = new Chart({ title: name, names: [name] });
        this.single.set(name, chart);
        $("more-charts").append(chart.root);
      }
      const chart = this.single.get(name);
      if (!name.includes(wanted)) chart.root.hidden = true;
      else chart.update(state.runs, state.active, state.smoothing);
    }
  }

  restyle() {
    for (const { charts } of this.sections) charts.forEach((chart) => chart.restyle());
    this.single.forEach((chart) => chart.restyle());
    this.update();
  }
}
