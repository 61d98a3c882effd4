"use strict";
// The plan's data, look-ups over it, and the few things that every other script needs.

const PLAN = JSON.parse(document.getElementById("plan").textContent);
const byId = (id) => document.getElementById(id);

// Rules are one word in the plan; this is who they are.
const RULES = {
  table: "the table of operators",
  kernel: "the device has no kernel for it in the low dtype",
  alias: "it shares memory with another value",
  guard: "the low dtype can't hold its values",
  policy: "your policy",
  region: "an autocast region of the program",
  captured: "it stays as the program has it",
  update: "it updates parameters in place",
  plan: "the planner, by cost",
  rewrite: "a pass that wrote it in place of another operator",
  cast: "a cast that was added",
  pad: "padding that was added",
  scale: "loss scaling that was added",
  copy: "a copy that was added",
};

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

// Nodes by key, "graph/name"; Maps, for a node may be called "constructor".
const NODES = new Map();
PLAN.graphs.forEach((graph, number) => {
  graph.number = number;
  graph.texts = new Map(graph.after.map(([name, text]) => [name, text]));
  graph.reads = new Map(graph.after.map(([name, , reads]) => [name, reads]));
  graph.readers = new Map();
  for (const [name, , reads] of graph.after) {
    for (const operand of reads) {
      if (!graph.readers.has(operand)) graph.readers.set(operand, []);
      graph.readers.get(operand).push(name);
    }
  }
  graph.gradients = new Map();
  for (const node of graph.backward) {
    if (!graph.gradients.has(node.forward)) graph.gradients.set(node.forward, []);
    graph.gradients.get(node.forward).push(node);
  }
  for (const node of graph.nodes) {
    node.graph = graph;
    node.key = keyOf(graph, node.name);
    node.kind = node.added ? "ADDED" : node.precision;
    node.words = [node.name, node.op, node.module, node.source, node.rule, node.reason, ...node.frames]
      .join("\n").toLowerCase();
    NODES.set(node.key, node);
  }
});

function keyOf(graph, name) {
  return `${graph.number}/${name}`;
}

/** What a person reads beside the colour: an added node says what it is for. */
function badge(kind, rule) {
  return el("span", { class: `badge ${kind}` }, kind === "ADDED" ? rule : kind);
}

function scaled(count, unit) {
  for (const [prefix, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (count >= scale) return `${(count / scale).toFixed(2)} ${prefix}${unit}`;
  }
  return `${count} ${unit}`;
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
