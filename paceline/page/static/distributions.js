/* Distributions over steps: the darker a cell, the more completions of its steps have the value. */

const KINDS = ["generated", "trained", "dropped"];
const MEASURES = [["staleness", "Staleness (versions)"], ["length", "Length (tokens)"], ["reward", "Reward"]];
const MAX_ROWS = 24, MAX_COLUMNS = 140, LEFT = 40, BOTTOM = 16;

/* Values of a measure in rows of the heat map: each value one row if there are few. */
function levels(run, measure) {
  const found = new Set();
  for (const row of run.distributions) for (const kind of KINDS) {
    for (const value in (row[kind] || {})[measure]) found.add(value);
  }
  const values = [...found].map(Number).sort((a, b) => a - b);
  if (values.length <= MAX_ROWS) {
    const at = new Map(values.map((value, index) => [value, index]));
    return { count: values.length, row: (value) => at.get(value), name: (index) => number(values[index]) };
  }
  const low = values[0], width = (values.at(-1) - low) / MAX_ROWS;
  return {
    count: MAX_ROWS,
    row: (value) => Math.min(MAX_ROWS - 1, Math.floor((value - low) / width)),
    name: (index) => `${number(low + index * width, 3)} to ${number(low + (index + 1) * width, 3)}`,
  };
}

class HeatMap {
  constructor(kind) {
    this.kind = kind;
    this.fact = element("span", { class: "quiet" });
    this.canvas = element("canvas", { role: "img" });
    this.none = element("div", { class: "none quiet" }, "none");
    this.root = element("div", { class: "panel", "data-kind": kind }, element("p", { class: "quiet" }, kind, this.fact), this.canvas, this.none);
    this.canvas.addEventListener("mousemove", (event) => this._point(event));
    this.canvas.addEventListener("mouseleave", () => { this.fact.textContent = this.about; });
  }

  draw(run, measure, scale) {
    const rows = run.distributions, per = Math.ceil(rows.length / MAX_COLUMNS);
    let count = 0, sum = 0;
    this.scale = scale;
    this.columns = [];
    for (let at = 0; at < rows.length; at += per) {
      const cells = new Array(scale.count).fill(0), part = rows.slice(at, at + per);
      for (const row of part) for (const [value, many] of Object.entries((row[this.kind] || {})[measure] || {})) {
        cells[scale.row(Number(value))] += many;
        count += many;
        sum += many * Number(value);
      }
      this.columns.push({ cells, first: part[0].step, last: part.at(-1).step, total: cells.reduce((a, b) => a + b, 0) });
    }
    const about = measure === "length" ? "" : `mean ${number(sum / count, 3)} · `;
    this.about = count ? `${about}${number(count)} completions` : "";
    this.fact.textContent = this.about;
    this.canvas.hidden = !count;
    this.none.hidden = Boolean(count);
    this.canvas.setAttribute("aria-label", `${measure} of ${this.kind} completions: ${this.about}`);
    if (count) this._paint();
  }

  _paint() {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width) return;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const cellWidth = (width - LEFT) / this.columns.length, cellHeight = (height - BOTTOM) / this.scale.count;
    const heat = style("--heat");
    this.columns.forEach((column, x) => column.cells.forEach((many, row) => {
      if (!many) return;
      pen.fillStyle = `rgba(${heat}, ${0.08 + 0.92 * Math.sqrt(many / column.total)})`;
      pen.fillRect(LEFT + x * cellWidth, height - BOTTOM - (row + 1) * cellHeight, Math.ceil(cellWidth), Math.max(1, cellHeight - 0.5));
    }));
    pen.fillStyle = style("--quiet");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    const marks = this.scale.count > 2 ? [0, Math.floor(this.scale.count / 2), this.scale.count - 1] : [...Array(this.scale.count).keys()];
    for (const row of marks) {
      const y = height - BOTTOM - (row + 0.5) * cellHeight + 4;
      pen.fillText(this.scale.name(row).split(" to ")[0], LEFT - 6, Math.max(10, y));
    }
    pen.fillText(String(this.columns.at(-1).last), width, height - 3);
    pen.textAlign = "left";
    pen.fillText(String(this.columns[0].first), LEFT, height - 3);
  }

  _point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT)) * this.columns.length);
    const row = Math.floor(((box.height - BOTTOM - (event.clientY - box.top)) / (box.height - BOTTOM)) * this.scale.count);
    const column = this.columns[x];
    if (!column || row < 0 || row >= this.scale.count) return;
    const steps = column.first === column.last ? column.first : `${column.first}–${column.last}`;
    this.fact.textContent = `step ${steps} · ${this.scale.name(row)} · ${percent(column.total ? column.cells[row] / column.total : 0)}`;
  }
}

class Distributions {
  constructor() {
    this.rows = MEASURES.map(([measure, title]) => {
      const maps = KINDS.map((kind) => new HeatMap(kind));
      const root = element("figure", { "data-measure": measure }, element("figcaption", {}, title),
        element("div", { class: "panels" }, ...maps.map((map) => map.root)));
      $("distributions").append(root);
      return { measure, maps };
    });
    new ResizeObserver(() => this.update()).observe($("distributions"));
  }

  update() {
    const run = state.active;
    const known = Boolean(run && run.distributions.length);
    $("distributions").hidden = !known;
    $("distributions-run").textContent = known ? run.name : "none recorded";
    if (!known) return;
    for (const { measure, maps } of this.rows) {
      const scale = levels(run, measure);
      maps.forEach((map) => map.draw(run, measure, scale));
    }
  }
}
