// The tables of nodes and of weight updates, and the panel of the chosen node.

const REPORT = JSON.parse(byId("report").textContent);
const panel = byId("panel");

const share = (what, kind) => (node) => (node[what] ? node[what][kind] : null);
const TABLES = {
  nodes: {
    items: REPORT.nodes,
    order: { column: 4, down: true },
    columns: [
      { title: "node", kind: "text", of: (n) => n.name },
      { title: "operator", kind: "text", of: (n) => n.op },
      { title: "module", kind: "text", of: (n) => n.module },
      { title: "source", kind: "text", of: (n) => n.source },
      { title: "error", kind: "error", about: "of the value, relative to its norm in FP64", of: (n) => n.error },
      { title: "in FP32", kind: "error", about: "the same of the FP32 program", of: (n) => n.error_fp32 },
      { title: "gradient's", kind: "error", about: "error of the gradient, relative to its norm in FP64", of: (n) => n.gradient_error },
      { title: "value → 0", kind: "share", about: `values that ${REPORT.low} rounds to zero`, of: share("shares", "flushed") },
      { title: "→ ∞", kind: "share", about: `values that ${REPORT.low} rounds to infinity`, of: share("shares", "overflowed") },
      { title: "gradient → 0", kind: "share", about: `gradients, times the loss scale, that ${REPORT.low} rounds to zero`, of: share("gradient_shares", "flushed") },
      { title: "→ ∞", kind: "share", about: `gradients, times the loss scale, that ${REPORT.low} rounds to infinity`, of: share("gradient_shares", "overflowed") },
      { title: "max |x|", kind: "size", about: "the largest finite magnitude of the value", of: (n) => n.value.amax },
      { title: "max |g|", kind: "size", about: "the largest finite magnitude of the gradient, loss scale included", of: (n) => n.gradient.amax },
    ],
    words: (n) => [n.name, n.op, n.module, n.source, n.precision],
  },
  updates: {
    items: REPORT.updates,
    order: { column: 1, down: true },
    columns: [
      { title: "parameter", kind: "text", of: (u) => u.parameter },
      { title: "would stall", kind: "share", about: `elements whose update is too small to move a weight stored in ${REPORT.low}`, of: (u) => u.stalls },
      { title: "|update| / |weight|", kind: "error", about: "the median over the elements that moved", of: (u) => u.ratio },
    ],
    words: (u) => [u.parameter],
  },
};
REPORT.nodes.forEach((node, place) => { node.place = place; });

const state = { table: "nodes", query: "" };

function showTable() {
  const { items, order, columns, words } = TABLES[state.table];
  const asked = state.query.toLowerCase().split(/\s+/);
  const shown = items.filter((item) => {
    const text = words(item).join("\n").toLowerCase();
    return asked.every((word) => text.includes(word));
  });
  byId("table").replaceChildren(sortedTable(shown, columns, order, showTable, rowOf));
  byId("status").textContent = `${shown.length} of ${items.length} ${state.table}`;
  for (const tab of document.querySelectorAll("[role='tab']")) {
    const chosen = tab.dataset.table === state.table;
    tab.setAttribute("aria-selected", String(chosen));
    if (chosen) byId("table").setAttribute("aria-labelledby", tab.id);
  }
  moved(chosenPlace());
}

function rowOf(item) {
  if (state.table !== "nodes") return {};
  const choosing = () => choose(item.place);
  return {
    "data-place": item.place, tabindex: "0", class: item.faults.length ? "wrong" : null, onclick: choosing,
    onkeydown: (event) => { if (event.key === "Enter") choosing(); },
  };
}

const chosenPlace = () => location.hash.slice(1);

function choose(place) {
  location.hash = String(place); // `hashchange` shows it
}

function moved(place) {
  for (const row of byId("table").querySelectorAll("tr[data-place]")) {
    row.classList.toggle("chosen", row.dataset.place === place);
  }
}

function showChosen() {
  const place = chosenPlace();
  const node = place === "" ? undefined : REPORT.nodes[Number(place)];
  panel.replaceChildren(...(node ? numbersOf(node) : [
    el("h2", {}, "All numbers of a node"),
    el("p", { class: "note" }, "Choose a row of the table of nodes, or the node of a fault. A head of the "
      + "table sorts by it, and / goes to the search."),
  ]));
  panel.scrollTop = 0;
  moved(place);
  const row = byId("table").querySelector(".chosen");
  if (row) row.scrollIntoView({ block: "nearest" });
}

function numbersOf(node) {
  const kind = node.added ? "ADDED" : node.precision;
  const facts = {
    operator: el("code", {}, node.op), module: node.module, source: node.source ? el("code", {}, node.source) : "",
    graph: REPORT.graphs > 1 ? String(node.graph) : "", before: node.added ? "" : el("code", {}, node.captured),
    after: el("code", {}, node.planned),
  };
  return [
    el("div", { class: "top" }, el("span", { class: `badge ${kind}` }, node.added ? node.rule : kind),
      el("h2", {}, node.name),
      el("button", { type: "button", "aria-label": "close", onclick: () => choose("") }, "×")),
    ...node.faults.map((fault) => el("p", { class: "fault" }, fault)),
    el("p", { class: `why ${kind}` }, node.reason),
    el("dl", {}, Object.entries(facts).filter(([, value]) => value)
      .map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("h3", {}, "Numbers"),
    numberTable(node),
    ...(node.frames.length ? [el("h3", {}, "Your lines that led here, outermost first"),
      el("ol", { class: "mono" }, node.frames.map((frame) => el("li", {}, frame)))] : []),
  ];
}

function numberTable(node) {
  const row = (title, kind, value, gradient) => el("tr", {}, el("td", {}, title),
    el("td", {}, FORMATS[kind](value)), el("td", {}, FORMATS[kind](gradient)));
  const both = (title, kind, field) => row(title, kind, node.value[field], node.gradient[field]);
  const shares = (title, field) => row(title, "share", share("shares", field)(node), share("gradient_shares", field)(node));
  return el("table", {},
    el("thead", {}, el("tr", {}, ["", "value", "gradient"].map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {},
      both("elements", "count", "count"), both("zeros", "count", "zeros"), both("infinite", "count", "infs"),
      both("NaN", "count", "nans"), both("largest finite magnitude", "size", "amax"),
      both("smallest above zero", "size", "amin"),
      row("relative error", "error", node.error, node.gradient_error),
      row("relative error in FP32", "error", node.error_fp32, null),
      shares(`rounded to zero by ${REPORT.low}`, "flushed"), shares("subnormal", "subnormal"),
      shares("rounded to infinity", "overflowed"),
      row("became zero in the run", "share", null, node.lost)));
}

for (const tab of document.querySelectorAll("[role='tab']")) {
  tab.addEventListener("click", () => { state.table = tab.dataset.table; showTable(); });
}
for (const link of document.querySelectorAll("#faults [data-place]")) {
  link.addEventListener("click", () => { choose(link.dataset.place); panel.scrollIntoView({ block: "nearest" }); });
}
byId("search").addEventListener("input", (event) => { state.query = event.target.value.trim(); showTable(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.matches("input")) {
    event.preventDefault();
    byId("search").focus();
  }
});
window.addEventListener("hashchange", showChosen);
showTable();
showChosen();
