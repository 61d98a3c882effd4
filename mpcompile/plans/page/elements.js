"use strict";
// The few things that every other script needs.

const byId = (id) => document.getElementById(id);

/** An element. Text goes in as text nodes, so that no name becomes markup. */
function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat(2).filter((child) => child != null && child !== false));
  return made;
}

function button(attributes, ...children) {
  return el("button", { type: "button", ...attributes }, ...children);
}

/** A name, which may go on in a new line after each of its dots and underscores. */
const breakable = (name) => name.split(/(?<=[._:])/).flatMap((part) => [part, el("wbr")]);

/** A table of texts; `total` is a last row, under a line. */
function table(heads, rows, total) {
  const row = (cells, kind) => el("tr", { class: kind }, cells.map((cell) => el("td", {}, cell)));
  return el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((cells) => row(cells)), total && row(total, "total")));
}

/** Arrow keys, Home and End move among the rows of a list, of which one is in the tab order. */
function moveByKeys(list, rows) {
  list.addEventListener("keydown", (event) => {
    const all = rows();
    const at = all.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined || !all[to]) return;
    event.preventDefault();
    all[to].focus();
  });
  list.addEventListener("focusin", (event) => {
    if (!rows().includes(event.target)) return;
    list.querySelectorAll("[tabindex='0']").forEach((row) => row.setAttribute("tabindex", "-1"));
    event.target.setAttribute("tabindex", "0");
  });
}

/** What a number shows as; a dash for one that isn't known. */
const known = (format, zero = "0") => (value) => (value == null ? "-" : value === 0 ? zero : format(value));
const FORMATS = {
  name: ([name, below]) => [el("span", {}, breakable(name)), below && el("span", { class: "sub" }, breakable(below))],
  count: known(String),
  error: known((value) => value.toExponential(1)),
  share: known((value) => (value < 1e-4 ? "<0.01%" : `${(100 * value).toFixed(2)}%`), "0%"),
  size: known((value) => (value === Infinity ? "∞" : value.toPrecision(3))),
};

function scaled(count, unit) {
  for (const [prefix, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (count >= scale) return `${(count / scale).toFixed(2)} ${prefix}${unit}`;
  }
  return `${count} ${unit}`;
}
