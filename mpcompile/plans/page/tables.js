// The views of a report: what its numbers are, in tables that are sorted by their heads.

const low = PLAN.low;
const column = (title, kind, of, about) => ({ title, kind, of, about });
const share = (what, kind) => ({ numbers }) => (numbers[what] ? numbers[what][kind] : null);

/** Per view: what it lists, which of it is shown, and by which column it is sorted. */
const TABLES = {
  numbers: {
    what: "nodes",
    items: (graphs) => graphs.flatMap((graph) => graph.nodes.filter((node) => node.numbers)),
    matches: nodeMatches,
    order: { column: 4, down: true },
    columns: [
      column("node", "text", (n) => n.name),
      column("operator", "text", (n) => n.op),
      column("module", "text", (n) => n.module),
      column("source", "text", (n) => n.source),
      column("error", "error", (n) => n.numbers.error, "of the value, relative to its norm in FP64"),
      column("in FP32", "error", (n) => n.numbers.error_fp32, "the same of the FP32 program"),
      column("gradient's", "error", (n) => n.numbers.gradient_error, "error of the gradient, relative to its norm in FP64"),
      column("value → 0", "share", share("shares", "flushed"), `values that ${low} rounds to zero`),
      column("→ ∞", "share", share("shares", "overflowed"), `values that ${low} rounds to infinity`),
      column("gradient → 0", "share", share("gradient_shares", "flushed"), `gradients, times the loss scale, that ${low} rounds to zero`),
      column("→ ∞", "share", share("gradient_shares", "overflowed"), `gradients, times the loss scale, that ${low} rounds to infinity`),
      column("max |x|", "size", (n) => n.numbers.value.amax, "the largest finite magnitude of the value"),
      column("max |g|", "size", (n) => n.numbers.gradient.amax, "the largest finite magnitude of the gradient, loss scale included"),
    ],
  },
  updates: {
    what: "updates",
    items: () => PLAN.updates,
    matches: (update) => wordsMatch(update.parameter.toLowerCase()),
    order: { column: 1, down: true },
    columns: [
      column("parameter", "text", (u) => u.parameter),
      column("would stall", "share", (u) => u.stalls, `elements whose update is too small to move a weight stored in ${low}`),
      column("|update| / |weight|", "error", (u) => u.ratio, "the median over the elements that moved"),
    ],
  },
};

/** Show the table of the view; say how much of it. */
function showTable({ what, items, matches, order, columns }, graphs) {
  const all = items(graphs);
  const shown = all.filter(matches);
  byId("rows").append(el("table", {},
    el("thead", {}, el("tr", {}, columns.map((one, number) => headOf(one, number, order)))),
    el("tbody", {}, sorted(shown, columns[order.column], order.down).map((item) => el("tr", rowOf(item),
      columns.map(({ kind, of }) => el("td", { class: kind === "text" && "words" }, FORMATS[kind](of(item)))))))));
  return `${shown.length} of ${all.length} ${what}`;
}

/** What isn't known is smaller than anything. */
function sorted(items, { kind, of }, down) {
  const rank = (item) => of(item) ?? -Infinity;
  const compare = (a, b) => (kind === "text" ? of(a).localeCompare(of(b)) : rank(a) - rank(b));
  return [...items].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
}

function headOf({ title, kind, about }, number, order) {
  const by = number === order.column;
  const sort = () => {
    order.down = by ? !order.down : kind !== "text";
    order.column = number;
    showRows();
  };
  return el("th", {
    scope: "col", class: kind === "text" && "words",
    "aria-sort": by ? (order.down ? "descending" : "ascending") : "none",
  }, button({ title: about, "data-column": number, onclick: sort }, title));
}

/** The attributes of a row: one of a node can be chosen. */
function rowOf({ key, faults }) {
  if (!key) return {};
  return {
    "data-key": key, tabindex: "-1", class: faults.length && "wrong", onclick: () => choose(key),
    onkeydown: (event) => { if (event.key === "Enter") choose(key, true); },
  };
}

/** All numbers of one node. */
function numbersOf({ numbers }) {
  if (!numbers) return null;
  const row = (title, kind, value, gradient) => [title, FORMATS[kind](value), FORMATS[kind](gradient)];
  const both = (title, kind, field) => row(title, kind, numbers.value[field], numbers.gradient[field]);
  const shares = (title, kind) => row(title, "share", share("shares", kind)({ numbers }), share("gradient_shares", kind)({ numbers }));
  return table(["", "value", "gradient"], [
    both("elements", "count", "count"), both("zeros", "count", "zeros"), both("infinite", "count", "infs"),
    both("NaN", "count", "nans"), both("largest finite magnitude", "size", "amax"),
    both("smallest above zero", "size", "amin"),
    row("relative error", "error", numbers.error, numbers.gradient_error),
    row("relative error in FP32", "error", numbers.error_fp32, null),
    shares(`rounded to zero by ${low}`, "flushed"), shares("subnormal", "subnormal"),
    shares("rounded to infinity", "overflowed"),
    row("became zero in the run", "share", null, numbers.lost),
  ]);
}
