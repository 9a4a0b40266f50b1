/* The viewer of samples: a list that draws only what is visible, and one completion in detail. */

const ITEM = 44;
const COLORINGS = [["logprob", "log-prob"], ["advantage", "advantage"], ["version", "version"], ["none", "none"]];

class Samples {
  constructor() {
    this.order = [];      // [group, completion] of the list
    this.at = 0;          // in the order
    this.step = null;     // of the slider; null: all
    this.found = null;    // groups of the search; null: all
    this.coloring = "logprob";
    this.list = $("list");
    this.list.addEventListener("scroll", () => this._drawList());
    new ResizeObserver(() => this._drawList()).observe(this.list);
    for (const id of ["reward-min", "reward-max", "end", "order"]) $(id).addEventListener("input", () => this.filter());
    $("filters").addEventListener("submit", (event) => event.preventDefault());
    $("search").addEventListener("input", () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.search(), 200); });
    $("step").addEventListener("input", () => this._setStep(Number($("step").value)));
    $("all-steps").addEventListener("click", () => this._setStep(null));
  }

  /* Show the active run; keep the chosen sample while samples are added. */
  update() {
    const run = state.active;
    if (!run) return;
    if (run !== this.run || run.epoch !== this.epoch) {
      Object.assign(this, { run, epoch: run.epoch, count: -1, chosen: null, found: null, step: null });
      $("search").value = "";
    }
    if (run.samples.length === this.count) return;
    this.count = run.samples.length;
    this.steps = [...new Set(run.samples.map((row) => row[0]))].sort((a, b) => a - b);
    $("step").max = Math.max(0, this.steps.length - 1);
    if (this.step === null) $("step").value = $("step").max;
    if ($("search").value) this.search();
    else this.filter();
  }

  async search() {
    const text = $("search").value.trim(), run = this.run;
    if (text) {
      const found = await source.search(run, text).catch(() => []);
      if (run !== this.run || text !== $("search").value.trim()) return;  // another search has begun
      this.found = new Set(found);
    } else this.found = null;
    this.filter();
  }

  filter() {
    if (!this.run) return;
    const low = parseFloat($("reward-min").value), high = parseFloat($("reward-max").value), end = $("end").value;
    const step = this.step === null ? null : this.steps[this.step];
    const kept = [];
    this.run.samples.forEach((row, group) => {
      if ((step !== null && row[0] !== step) || (this.found && !this.found.has(group))) return;
      row[4].forEach(([reward, , truncated], completion) => {
        if (reward < low || reward > high || (end !== "" && truncated !== Number(end))) return;
        kept.push([group, completion]);
      });
    });
    this._sort(kept);
    this.order = kept;
    $("count").textContent = `${kept.length.toLocaleString("en-US")} of ${this.run.samples.reduce((sum, row) => sum + row[4].length, 0).toLocaleString("en-US")} completions`;
    $("step-text").textContent = step === null ? "all" : step;
    const same = this.chosen ? kept.findIndex(([group, completion]) => group === this.chosen[0] && completion === this.chosen[1]) : -1;
    this.at = Math.max(0, same);
    this._drawList();
    if (same < 0) { this.list.scrollTop = 0; this.choose(0); }
  }

  _sort(kept) {
    const rows = this.run.samples, value = (entry, field) => rows[entry[0]][4][entry[1]][field];
    const by = {
      new: (a, b) => b[0] - a[0] || a[1] - b[1], old: null,
      best: (a, b) => value(b, 0) - value(a, 0), worst: (a, b) => value(a, 0) - value(b, 0),
      long: (a, b) => value(b, 1) - value(a, 1),
    }[$("order").value];
    if (by) kept.sort(by);
  }

  _setStep(step) {
    this.step = step;
    if (step !== null) $("step").value = step;
    this.chosen = null;
    this.filter();
  }

  /* Move by one step: from the slider's, or from that of the chosen sample. */
  moveStep(by) {
    if (!this.steps || !this.steps.length) return;
    const from = this.step ?? (this.chosen ? this.steps.indexOf(this.run.samples[this.chosen[0]][0]) + (by > 0 ? -1 : 1) : 0);
    this._setStep(Math.min(this.steps.length - 1, Math.max(0, from + by)));
  }

  move(by) { this.choose(Math.min(this.order.length - 1, Math.max(0, this.at + by)), true); }

  nextColoring() {
    const names = COLORINGS.map(([name]) => name);
    this.coloring = names[(names.indexOf(this.coloring) + 1) % names.length];
    this._drawDetail();
  }

  clear() {
    for (const id of ["search", "reward-min", "reward-max", "end"]) $(id).value = "";
    this.found = null;
    this._setStep(null);
  }

  async choose(at, scroll) {
    this.at = at;
    this.chosen = this.order[at] || null;
    if (scroll) {
      const top = at * ITEM, view = this.list.clientHeight;
      if (top < this.list.scrollTop) this.list.scrollTop = top;
      else if (top + ITEM > this.list.scrollTop + view) this.list.scrollTop = top + ITEM - view;
    }
    this._drawList();
    const chosen = this.chosen, run = this.run;
    if (!chosen) {
      const why = this.count ? "No completion matches the filter." : "No samples are saved yet (see save_samples).";
      this.group = null;
      $("detail").replaceChildren(element("p", { class: "empty" }, why));
      return;
    }
    if (!this.group || this.group.run !== run || this.group.index !== chosen[0]) {
      const row = await source.group(run, chosen[0]).catch(() => null);
      if (this.chosen !== chosen || this.run !== run) return;  // another one was chosen meanwhile
      this.group = row && { run, index: chosen[0], row };
    }
    this._drawDetail();
  }

  _drawList() {
    if (!this.run) return;
    const first = Math.max(0, Math.floor(this.list.scrollTop / ITEM) - 4);
    const last = Math.min(this.order.length, first + Math.ceil((this.list.clientHeight || 600) / ITEM) + 8);
    const space = $("list-space");
    space.style.height = `${this.order.length * ITEM}px`;
    space.replaceChildren(...this.order.slice(first, last).map((entry, index) => this._item(entry, first + index)));
  }

  _item([group, completion], at) {
    const [step, uid, staleness, prompt, completions] = this.run.samples[group];
    const [reward, tokens, truncated, text] = completions[completion];
    const item = element("div", { class: "item", role: "option", "aria-selected": at === this.at ? "true" : "false", onclick: () => this.choose(at) },
      element("div", {}, `step ${step}`, element("span", {}, `${tokens} tokens${truncated ? ", truncated" : ""}`),
        staleness ? element("span", {}, `staleness ${staleness}`) : null, element("span", { class: "reward" }, number(reward))),
      element("span", { class: "snippet", title: uid }, shown(`${prompt} `), element("b", {}, shown(text))));
    item.style.top = `${at * ITEM}px`;
    return item;
  }

  _drawDetail() {
    if (!this.group || !this.chosen) return;
    const group = this.group.row, sample = group.completions[this.chosen[1]];
    if (!sample) return;
    const rewards = group.completions.filter((one) => one.agent === sample.agent).map((one) => one.reward || 0);
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const spread = Math.max(...rewards.map((reward) => Math.abs(reward - mean)), 1e-9);
    const known = group.completions.flatMap((one) => one.turns || [one]).flatMap((part) => (part.advantages || []).map(([value]) => Math.abs(value)));
    const advantage = { value: sample.reward - mean, share: (sample.reward - mean) / spread, largest: known.length ? Math.max(...known, 1e-9) : null };
    const facts = [["step", group.step], ...(sample.agent ? [["agent", sample.agent]] : []), ["reward", number(sample.reward)], ["reward − group mean", number(advantage.value, 3)],
      ...Object.entries(sample.details || {}).map(([name, value]) => [name, number(value)]),
      ["tokens", `${sample.tokens}${sample.finish === "length" ? ", truncated" : ""}`], ["staleness", group.staleness]];
    $("detail").replaceChildren(
      element("div", { class: "facts" }, ...facts.map(([name, value]) => element("span", {}, element("span", { class: "quiet" }, shown(`${name} `)), element("b", {}, shown(String(value)))))),
      this._siblings(group),
      element("h3", {}, "Prompt ", element("span", { class: "quiet" }, shown(group.uid))), element("pre", { class: "text prompt" }, shown(group.prompt)),
      this._heading(sample), ...this._turns(sample, advantage));
  }

  _siblings(group) {
    return element("div", { class: "siblings", role: "group", "aria-label": "Completions of this prompt" },
      ...group.completions.map((one, index) => element("button", {
        type: "button", title: `completion ${index + 1}: reward ${number(one.reward)}`, "aria-pressed": index === this.chosen[1] ? "true" : "false",
        onclick: () => this._sibling(index) }, number(one.reward, 3))));
  }

  _sibling(completion) {
    const group = this.chosen[0], at = this.order.findIndex((entry) => entry[0] === group && entry[1] === completion);
    if (at >= 0) return this.choose(at, true);
    this.chosen = [group, completion];  // the filter hides it in the list
    this._drawDetail();
  }

  _heading(sample) {
    const buttons = COLORINGS.map(([name, title]) => element("button", { type: "button", "data-coloring": name,
      "aria-pressed": name === this.coloring ? "true" : "false", onclick: () => { this.coloring = name; this._drawDetail(); } }, title));
    const known = sample.logprobs || (sample.turns || []).some((turn) => turn.logprobs);
    return element("div", { class: "heading" }, element("h3", {}, sample.turns ? "Turns" : "Completion"),
      known ? element("span", { class: "coloring" }, element("span", { class: "quiet" }, "Color"), ...buttons) : null);
  }

  _turns(sample, advantage) {
    const parts = sample.turns || [sample];
    const versions = parts.flatMap((part) => (part.versions || []).map(([version]) => version));
    const range = [Math.min(...versions), Math.max(...versions)];
    const found = parts.flatMap((part, index) => {
      const text = element("pre", { class: "text completion" }, tokens(part, this.coloring, advantage, range));
      if (!sample.turns) return [text];
      const reward = part.reward ? ` · reward ${number(part.reward)}` : "";
      const given = part.restarts ? "Context rewritten: new sample" : index ? "Environment" : "Changed prompt";
      return [part.prompt ? element("h3", {}, given) : null,
        part.prompt ? element("pre", { class: "text environment" }, shown(part.prompt)) : null,
        element("h3", {}, `Turn ${index + 1}${reward}`), text].filter(Boolean);
    });
    const legend = { logprob: "Warm: the policy found the token unlikely.", none: "",
      advantage: advantage.largest ? "Green: the trainer made the token more likely (advantage above 0). Red: less likely."
        : "Green: better than the mean reward of this prompt. Red: worse.",
      version: versions.length ? `Policy versions ${range[0]} to ${range[1]}; darker is newer.` : "" }[this.coloring];
    if (versions.length) found.push(element("p", { class: "legend" }, legend));
    return found;
  }
}

/* The text of a turn, each token with its color. */
function tokens(part, coloring, advantage, range) {
  const parts = document.createDocumentFragment();
  if (!part.token_characters || coloring === "none") {
    parts.append(shown(part.text));
    return parts;
  }
  const each = (runs) => (runs || []).flatMap(([value, count]) => new Array(count).fill(value));
  const characters = Array.from(part.text), versions = each(part.versions), advantages = each(part.advantages);
  let at = 0;
  part.token_characters.forEach((count, index) => {
    const text = characters.slice(at, at + count).join("");
    at += count;
    if (!text) return;
    const logprob = part.logprobs[index];
    const own = advantages[index], known = own === undefined ? "" : ` · advantage ${number(own, 3)}`;
    const span = element("span", { class: "token", title: `log-prob ${number(logprob, 3)} · probability ${percent(Math.exp(logprob))} · version ${versions[index]}${known}` }, shown(text));
    const trained = own === undefined ? advantage : { value: own, share: own / advantage.largest };
    span.style.background = tokenColor(coloring, logprob, versions[index], trained, range);
    parts.append(span);
  });
  parts.append(shown(characters.slice(at).join("")));
  return parts;
}

function tokenColor(coloring, logprob, version, advantage, range) {
  if (coloring === "logprob") return `rgba(234, 120, 30, ${Math.min(0.65, -logprob * 0.13).toFixed(3)})`;
  if (coloring === "version") return `rgba(124, 58, 237, ${(0.08 + (range[1] > range[0] ? 0.42 * ((version - range[0]) / (range[1] - range[0])) : 0.1)).toFixed(3)})`;
  const strength = (0.35 * Math.min(1, Math.abs(advantage.share))).toFixed(3);
  return advantage.value >= 0 ? `rgba(22, 163, 74, ${strength})` : `rgba(220, 38, 38, ${strength})`;
}
