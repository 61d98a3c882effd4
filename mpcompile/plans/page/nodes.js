// The page's data, and look-ups over it.

const PLAN = JSON.parse(byId("plan").textContent);

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

// Nodes by key, "graph/name"; Maps, for a node may be called "constructor".
const NODES = new Map();
PLAN.graphs.forEach((graph, number) => {
  graph.number = number;
  graph.texts = new Map(graph.after.map(([name, text]) => [name, text]));
  graph.reads = new Map(graph.after.map(([name, , reads]) => [name, reads]));
  graph.readers = listsBy(graph.after.flatMap(([name, , reads]) => reads.map((operand) => [operand, name])));
  graph.gradients = listsBy(graph.backward.map((node) => [node.forward, node]));
  for (const node of graph.nodes) {
    node.graph = graph;
    node.key = keyOf(graph, node.name);
    node.kind = node.added ? "ADDED" : node.precision;
    node.words = [node.name, node.op, node.module, node.source, node.rule, node.reason, ...node.frames]
      .join("\n").toLowerCase();
    NODES.set(node.key, node);
  }
});

/** Pairs of a key and an item -> key -> its items. */
function listsBy(pairs) {
  const lists = new Map();
  for (const [key, item] of pairs) lists.set(key, [...(lists.get(key) || []), item]);
  return lists;
}

function keyOf(graph, name) {
  return `${graph.number}/${name}`;
}

/** What a person reads beside the colour: an added node says what it is for. */
function badge(kind, rule) {
  return el("span", { class: `badge ${kind}` }, kind === "ADDED" ? rule : kind);
}
