/* Settings and results of the runs, side by side. */

class SettingTable {
  constructor() {
    $("setting-filter").addEventListener("input", () => this.update());
    $("only-different").addEventListener("change", () => this.update());
  }

  update() {
    const runs = state.runs, wanted = $("setting-filter").value.toLowerCase();
    $("only-different").closest("label").hidden = runs.length < 2;
    const rows = [];
    for (const [title, field] of [["Settings", "config"], ["Results", "summary"]]) {
      const names = [...new Set(runs.flatMap((run) => Object.keys(run[field])))];
      const kept = names.map((name) => [name, runs.map((run) => run[field][name])]).filter(([name, values]) =>
        (name.toLowerCase().includes(wanted) || values.some((value) => value && value.toLowerCase().includes(wanted))) &&
        (runs.length < 2 || !$("only-different").checked || different(values)));
      if (!kept.length) continue;
      rows.push(element("tr", {}, element("th", { scope: "colgroup" }, title),
        ...runs.map((run, index) => element("th", { scope: "col" }, element("span", { class: "key", color: runColor(index) }), shown(run.name)))));
      for (const [name, values] of kept) {
        rows.push(element("tr", { class: field === "config" && runs.length > 1 && different(values) ? "different" : null },
          element("td", {}, shown(name)), ...values.map((value) => element("td", { class: "mono" }, shown(tidy(value, field))))));
      }
    }
    $("setting-table").replaceChildren(rows.length ? element("table", {}, element("tbody", {}, ...rows)) : element("p", { class: "empty" }, "Nothing matches."));
  }
}

const different = (values) => new Set(values).size > 1;

function tidy(value, field) {
  if (value === undefined) return "–";
  if (value === "null") return "not set";
  return field === "summary" && /^-?\d+\.\d+/.test(value) ? number(Number(value)) : value;
}
