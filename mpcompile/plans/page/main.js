// Puts it together: the filters, what is chosen, and the address (#graph/node) that remembers it.

const KINDS = { ALL: "All", LOW: "LOW", FULL: "FULL", KEEP: "KEEP", ADDED: "ADDED" };
const KIND_TITLES = {
  ALL: "every operator",
  LOW: `in the low dtype, ${PLAN.low}`,
  FULL: "in FP32",
  KEEP: "in the dtypes that the program has",
  ADDED: "casts, pads and scaling that the passes added",
};

function makeControls() {
  const counts = {};
  const rules = new Set();
  for (const node of NODES.values()) {
    counts[node.kind] = (counts[node.kind] || 0) + 1;
    rules.add(node.rule);
  }
  for (const [kind, word] of Object.entries(KINDS)) {
    byId("kinds").append(button({
      "data-kind": kind, title: KIND_TITLES[kind], onclick: () => change({ kind }),
    }, kind === "ALL" ? word : `${word} ${counts[kind] || 0}`));
  }
  byId("rule").append(el("option", { value: "" }, "any"),
    ...[...rules].sort().map((rule) => el("option", { value: rule, title: RULES[rule] }, rule)));
  byId("graph").append(el("option", { value: "all" }, "all"),
    ...PLAN.graphs.map((graph) => el("option", { value: graph.number }, graphTitle(graph))));
  byId("graph-label").hidden = PLAN.graphs.length < 2;
  byId("rule").addEventListener("change", (event) => change({ rule: event.target.value }));
  byId("graph").addEventListener("change", (event) => change({ graph: event.target.value }));
  byId("search").addEventListener("input", (event) => change({ query: event.target.value.trim() }));
  byId("module-filter").lastElementChild.addEventListener("click", () => chooseModule(""));
  for (const tab of document.querySelectorAll("[role='tab']")) {
    tab.addEventListener("click", () => change({ view: tab.dataset.view }));
  }
  for (const link of document.querySelectorAll(".fault .link")) {
    link.addEventListener("click", () => { choose(link.dataset.key); panel.scrollIntoView({ block: "nearest" }); });
  }
}

function change(wanted) {
  Object.assign(state, wanted);
  opened.clear();
  showControls();
  showRows();
}

/** Make the controls say what the state says. */
function showControls() {
  for (const button of byId("kinds").children) {
    button.setAttribute("aria-pressed", String(button.dataset.kind === state.kind));
  }
  for (const tab of document.querySelectorAll("[role='tab']")) {
    const chosen = tab.dataset.view === state.view;
    tab.setAttribute("aria-selected", String(chosen));
    if (chosen) byId("rows").setAttribute("aria-labelledby", tab.id);
  }
  if (byId("search").value.trim() !== state.query) byId("search").value = state.query;
  byId("rule").value = state.rule;
  byId("graph").value = state.graph;
  for (const filter of document.querySelectorAll(".filter")) filter.hidden = state.view === "updates";
  byId("module-filter").hidden = !state.module;
  byId("module-filter").firstElementChild.textContent = state.module;
}

function chooseModule(path) {
  change({ module: path });
  if (tree) showTree();
}

/** The key of the node that the address names, or "". */
function chosenKey() {
  const name = location.hash.slice(1);
  const node = [...NODES.values()].find((one) => encodeURIComponent(one.key) === name);
  return node ? node.key : "";
}

/** Choose a node by its key, or none by ""; with the keyboard, go to its panel. */
function choose(key, byKeyboard = false) {
  location.hash = encodeURIComponent(key);
  showChosen(); // at once: `hashchange` comes later, and also when the reader goes back
  if (byKeyboard) panel.focus();
}

function showChosen() {
  showPanel(NODES.get(chosenKey()));
  mark();
  const row = document.querySelector("#rows .chosen");
  if (row) row.scrollIntoView({ block: "nearest" });
}

/** Colour the rows of the chosen node. */
function mark() {
  const key = chosenKey();
  for (const row of document.querySelectorAll("#rows [data-key]")) {
    const chosen = Boolean(key) && row.dataset.key === key;
    row.classList.toggle("chosen", chosen);
    if (chosen) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    byId("search").focus();
  } else if (event.key === "Escape" && panel.contains(event.target)) {
    const row = document.querySelector("#rows .chosen");
    if (row) row.focus();
  }
});

/** What a reader without an address came for: the most serious fault, or the costliest product in FP32. */
function firstKey() {
  const fault = document.querySelector(".fault .link");
  const products = [...NODES.values()].filter((node) => node.product && node.kind === "FULL");
  const [costliest] = products.sort((a, b) => b.product.flops - a.product.flops);
  return fault ? fault.dataset.key : costliest ? costliest.key : "";
}

makeControls();
if (tree) makeTree();
moveByKeys(byId("rows"), () => [...byId("rows").querySelectorAll("[tabindex]")]);
window.addEventListener("hashchange", showChosen);
showControls();
showRows();
const first = location.hash ? "" : firstKey();
if (first) location.replace(`#${encodeURIComponent(first)}`);
showChosen();
if (first) scrollTo(0, 0); // the summary comes first
