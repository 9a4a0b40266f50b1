/* The runs of the page: embedded in the document, or polled from its server. */

const POLL_MS = 1000;
const EMBEDDED = JSON.parse($("data").textContent);

function emptyRun(name) {
  return { name, path: "", state: "", epoch: -1, metrics: { step: [] }, distributions: [], evaluations: [],
    samples: [], config: {}, summary: {}, workers: [], warnings: [], more: true };
}

class EmbeddedSource {
  async start(changed) {
    this.runs = EMBEDDED.runs;
    changed();
  }
  async group(run, index) { return run.groups[index]; }
  async search(run, text) {
    const wanted = text.toLowerCase();
    const has = (value) => typeof value === "string" && value.toLowerCase().includes(wanted);
    const found = [];
    run.groups.forEach((group, index) => {
      const texts = group.completions.flatMap((sample) =>
        [sample.text, ...(sample.turns || []).flatMap((turn) => [turn.prompt, turn.text])]);
      if (has(group.prompt) || has(group.uid) || texts.some(has)) found.push(index);
    });
    return found;
  }
}

class LiveSource {
  async start(changed) {
    const names = await this._get("runs");
    this.runs = names.map(emptyRun);
    changed();
    this.runs.forEach((run, index) => this._poll(run, index, changed));
  }
  group(run, index) { return this._get("group", { run: this.runs.indexOf(run), group: index }); }
  search(run, text) { return this._get("search", { run: this.runs.indexOf(run), text }); }

  async _get(name, query) {
    const reply = await fetch(`${name}?${new URLSearchParams(query || {})}`);
    if (!reply.ok) throw new Error(`${name}: ${reply.status}`);
    return reply.json();
  }

  async _poll(run, index, changed) {
    for (;;) {
      try {
        const seen = { metrics: run.metrics.step.length, distributions: run.distributions.length,
          evaluations: run.evaluations.length, samples: run.samples.length };
        const was = `${run.state}${run.warnings.length}${JSON.stringify(run.workers)}`;
        const news = await this._get("data", { run: index, epoch: run.epoch, ...seen });
        const grew = merge(run, news);
        $("problem").hidden = true;
        if (grew || was !== `${run.state}${run.warnings.length}${JSON.stringify(run.workers)}`) changed();
      } catch (error) {
        $("problem").hidden = false;
        $("problem").textContent = "paceline watch does not respond: the page shows the last data. Start it again and open its new address.";
        run.more = false;  // wait before the next request
      }
      if (!run.more) await pause(document.hidden ? 10 * POLL_MS : POLL_MS);
    }
  }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/* Add what is new to a run; return whether the open view shows any of it. */
function merge(run, news) {
  if (news.epoch !== run.epoch) Object.assign(run, emptyRun(run.name), { epoch: news.epoch });
  const count = run.metrics.step.length, added = news.metrics.step.length;
  for (const [name, column] of Object.entries(news.metrics)) {
    const known = run.metrics[name] || (run.metrics[name] = new Array(count).fill(null));
    for (const value of column) known.push(value);
  }
  for (const name of ["distributions", "evaluations", "samples"]) for (const row of news[name]) run[name].push(row);
  for (const name of ["name", "path", "state", "config", "summary", "workers", "warnings", "more"]) run[name] = news[name];
  const curves = added + news.distributions.length + news.evaluations.length;
  return curves > 0 || (state.view === "samples" && news.samples.length > 0);
}

const source = EMBEDDED ? new EmbeddedSource() : new LiveSource();
