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
  made.append(...children.flat(2).filter((child) => child != null));
  return made;
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
