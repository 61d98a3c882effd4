// The views of a report: what its numbers are, in tables that are sorted by their heads.

const low = PLAN.low;
const column = (title, kind, of, about, group = "") => ({ title, kind, of, about, group });
const share = (what, kind) => ({ numbers }) => (numbers[what] ? numbers[what][kind] : null);
const badOf = ({ infs, nans }) => (nans ? NaN : infs ? Infinity : null);

const largest = (side) => ({ numbers }) => badOf(numbers[side]) ?? numbers[side].amax;

/** Two columns below one head: of a forward value, and of its gradient. */
function pair(group, kind, of, ofGradient, about) {
  return [column("value", kind, of, about, group), column("gradient", kind, ofGradient, `${about}, of the gradient times the loss scale`, group)];
}

/** Per view: what it lists, which of it is shown, and by which column it is sorted. */
const TABLES = {
  numbers: {
    what: "nodes",
    items: (graphs) => graphs.flatMap((graph) => graph.nodes.filter((node) => node.numbers)),
    matches: nodeMatches,
    order: { column: 2, down: true },
    columns: [
      column("node, operator", "name", (n) => [n.name, n.op]),
      column("module, source", "name", (n) => [n.module, n.source]),
      ...pair("relative error", "error", (n) => n.numbers.error, (n) => n.numbers.gradient_error, "relative to its norm in FP64"),
      column("in FP32", "error", (n) => n.numbers.error_fp32, "of the value in the FP32 program", "relative error"),
      ...pair(`rounded to zero by ${low}`, "share", share("shares", "flushed"), share("gradient_shares", "flushed"), "share of what is not zero"),
      ...pair(`to infinity by ${low}`, "share", share("shares", "overflowed"), share("gradient_shares", "overflowed"), "share of what is not zero"),
      ...pair("largest magnitude", "size", largest("value"), largest("gradient"), "the largest magnitude"),
    ],
  },
  updates: {
    what: "updates",
    items: () => PLAN.updates,
    matches: (update) => wordsMatch(update.parameter.toLowerCase()),
    order: { column: 1, down: true },
    columns: [
      column("parameter", "name", (u) => [u.parameter]),
      column("would stall", "share", (u) => u.stalls, `elements whose update is too small to move a weight stored in ${low}`),
      column("update relative to weight", "error", (u) => u.ratio, "the median over the elements that moved"),
    ],
  },
};

/** Show the table of the view; say how much of it. */
function showTable({ what, items, matches, order, columns }, graphs) {
  const all = items(graphs);
  const shown = all.filter(matches);
  byId("rows").append(el("table", {},
    el("thead", {}, groupsOf(columns), el("tr", {}, columns.map((one, number) => headOf(one, number, order)))),
    el("tbody", {}, sorted(shown, columns[order.column], order.down).map((item) => el("tr", rowOf(item),
      columns.map(({ kind, of }) => el("td", { class: kind === "name" && "words" }, FORMATS[kind](of(item)))))))));
  return `${shown.length} of ${all.length} ${what}`;
}

/** A row of heads, each over the columns of one group. */
function groupsOf(columns) {
  const spans = listsBy(columns.filter((one) => one.group).map((one) => [one.group, one]));
  if (!spans.size) return null;
  const names = columns.filter((one) => one.kind === "name");
  return el("tr", {}, names.map(() => el("td")),
    [...spans].map(([group, all]) => el("th", { scope: "colgroup", colspan: all.length, class: "group" }, group)));
}

/** Faults first. What isn't known is smaller than anything, and NaN is larger. */
function sorted(items, { kind, of }, down) {
  const rank = (item) => (Number.isNaN(of(item)) ? Infinity : of(item) ?? -Infinity);
  const compare = (a, b) => (kind === "name" ? String(of(a)).localeCompare(of(b)) : rank(a) - rank(b));
  const wrong = (item) => Number(Boolean(item.faults && item.faults.length));
  return [...items].sort((a, b) => wrong(b) - wrong(a) || (down ? compare(b, a) : compare(a, b)));
}

function headOf({ title, kind, about }, number, order) {
  const by = number === order.column;
  const sort = () => {
    order.down = by ? !order.down : kind !== "name";
    order.column = number;
    showRows();
  };
  return el("th", {
    scope: "col", class: kind === "name" && "words",
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
    both("NaN", "count", "nans"), row("largest magnitude", "size", largest("value")({ numbers }), largest("gradient")({ numbers })),
    both("smallest above zero", "size", "amin"),
    row("relative error", "error", numbers.error, numbers.gradient_error),
    row("relative error in FP32", "error", numbers.error_fp32, null),
    shares(`rounded to zero by ${low}`, "flushed"), shares("subnormal", "subnormal"),
    shares("rounded to infinity", "overflowed"),
    row("became zero in the run", "share", null, numbers.lost),
  ]);
}
