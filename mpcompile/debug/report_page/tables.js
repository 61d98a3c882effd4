// A table that is sorted by its heads.

/** What a number shows as; a dash for one that isn't known. */
const FORMATS = {
  text: (value) => value,
  error: (value) => (value === null ? "-" : value === 0 ? "0" : value.toExponential(1)),
  share: (value) => {
    if (value === null || value === undefined) return "-";
    return value > 0 && value < 1e-4 ? "<0.01%" : `${(100 * value).toFixed(value ? 2 : 0)}%`;
  },
  size: (value) => (value === null ? "-" : value === 0 ? "0" : value.toPrecision(3)),
  count: (value) => String(value),
};

/**
 * A table of items.
 *
 * columns: `{ title, about, kind, of }`: the head, its explanation, a key of FORMATS, and what an
 * item has there.
 * order: `{ column, down }`, which clicks on heads change.
 * again: called after such a click.
 * row: makes attributes of an item's row.
 */
function sortedTable(items, columns, order, again, row) {
  const { of, kind } = columns[order.column];
  const rank = (item) => (of(item) === null || of(item) === undefined ? -Infinity : of(item));
  const compare = (a, b) => (kind === "text" ? of(a).localeCompare(of(b)) : rank(a) - rank(b));
  const sorted = [...items].sort((a, b) => (order.down ? compare(b, a) : compare(a, b)));
  const head = (column, number) => {
    const by = number === order.column;
    return el("th", {
      scope: "col", class: column.kind === "text" ? "words" : null,
      "aria-sort": by ? (order.down ? "descending" : "ascending") : "none",
    }, el("button", {
      type: "button", title: column.about, "data-column": number,
      onclick: () => {
        order.down = by ? !order.down : column.kind !== "text";
        order.column = number;
        again();
      },
    }, column.title));
  };
  const cell = (item, column) => el("td", { class: column.kind === "text" ? "words" : null },
    FORMATS[column.kind](column.of(item)));
  return el("table", {},
    el("thead", {}, el("tr", {}, columns.map(head))),
    el("tbody", {}, sorted.map((item) => el("tr", row(item), columns.map((column) => cell(item, column))))));
}
