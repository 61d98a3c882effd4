// The right: everything that the plan knows about one node.

const panel = byId("panel");

function showPanel(node) {
  if (!node) {
    panel.replaceChildren(el("h2", {}, PLAN.updates ? "All numbers of a node" : "Why is a node in this precision?"),
      el("p", { class: "note" }, PLAN.updates ? "Choose a node in the list, or the one of a fault. A head of a table sorts by it. "
        : "Choose a node in the list, or a module on the left and then one of its nodes. ",
      "/ goes to the search, arrow keys move in lists, Enter chooses, Escape goes back."));
    return;
  }
  panel.replaceChildren(
    el("div", { class: "top" }, badge(node.kind, node.rule), el("h2", {}, node.name),
      button({ "aria-label": "close", onclick: () => choose("") }, "×")),
    ...(node.faults || []).map((fault) => el("p", { class: "fault" }, fault)),
    el("p", { class: `why ${node.kind}` }, node.reason),
    facts(node),
    ...section("Numbers", numbersOf(node)),
    ...section("To change it", el("p", {}, node.change)),
    ...section("What the planner weighed", weighed(node)),
    ...section(PLAN.units ? "Tensor Cores" : "Product", product(node)),
    ...section("Casts, pads and scaling beside it", links(node, beside(node))),
    ...section("Reads", links(node, node.graph.reads.get(node.name) || [])),
    ...section("Read by", links(node, node.graph.readers.get(node.name) || [])),
    ...section("Backward", gradients(node)),
    ...section("Your lines that led here, outermost first",
      node.frames.length ? el("ol", { class: "mono" }, node.frames.map((frame) => el("li", {}, frame))) : null),
  );
  panel.scrollTop = 0;
}

function section(title, content) {
  return content ? [el("h3", {}, title), content] : [];
}

function facts(node) {
  const words = { LOW: `LOW: ${node.low}`, FULL: "FULL: FP32", KEEP: "KEEP: the dtypes that it was made with" };
  const all = {
    precision: words[node.precision],
    "decided by": node.rule in RULES ? RULES[node.rule] : node.rule,
    operator: el("code", {}, node.op),
    module: node.module
      ? button({ class: "link", onclick: () => chooseModule(node.module) }, node.module) : null,
    source: node.source ? el("code", {}, node.source) : null,
    before: node.captured ? el("code", {}, node.captured) : "not in the program",
    after: el("code", {}, node.planned),
    products: node.products ? `${node.products} inside; they stay FP32` : null,
  };
  return el("dl", {}, Object.entries(all).filter(([, value]) => value)
    .map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** The least totals with either precision, as `why()` prints them. */
function weighed(node) {
  const one = ({ heads, rows, notes }) => [rows.length ? table(heads, rows.slice(0, -1), rows.at(-1)) : null,
    ...notes.map((note) => el("p", {}, note))];
  return node.weighed.length ? el("div", {}, node.weighed.flatMap(one)) : null;
}

function product(node) {
  const op = node.product;
  if (!op) return null;
  const yes = (eligible) => (eligible ? "yes" : "no");
  return el("div", {}, PLAN.units && el("p", {}, op.reason),
    table([`${op.kind}, ${scaled(op.flops, "FLOP")}`, "as captured", "as compiled"],
      Object.keys(op.before).map((dim) => [dim, String(op.before[dim]), String(op.after[dim])]),
      PLAN.units && ["eligible", yes(op.eligible_before), yes(op.eligible)]));
}

/** The added nodes among operands and readers. */
function beside(node) {
  const graph = node.graph;
  const near = [...(graph.reads.get(node.name) || []), ...(graph.readers.get(node.name) || [])];
  return near.filter((name) => (NODES.get(keyOf(graph, name)) || {}).added);
}

/** Nodes as links; inputs and the result are no nodes of the plan, and are text. */
function links(node, names) {
  if (!names.length) return null;
  return el("ul", {}, names.map((name) => {
    const other = NODES.get(keyOf(node.graph, name));
    if (!other) return el("li", {}, el("code", {}, (node.graph.texts.get(name) || name).replace(" = input", "")));
    return el("li", {}, badge(other.kind, other.rule), linkTo(other.key, `${name}: ${other.planned}`));
  }));
}

function linkTo(key, text) {
  return button({ class: "link", onclick: () => choose(key) }, text);
}

function gradients(node) {
  const found = node.graph.gradients.get(node.name);
  if (!found) return null;
  const show = () => change({ view: "backward", query: node.name, kind: "ALL", rule: "", module: "" });
  return el("ul", {}, found.map((one) => el("li", {}, badge(one.precision, ""),
    button({ class: "link", onclick: show },
      `${one.name}: ${one.result} = ${one.op}${one.recomputed ? " (computed again)" : ""}`))));
}
