// The middle: which nodes match the filters, and the rows of each view.

const state = { view: document.querySelector("[role='tab']").dataset.view, graph: "all", query: "", kind: "ALL", rule: "", module: "" };
const opened = new Set(); // folds of lines that the reader has opened
const FOLDED = 5; // so many added lines in a row are folded
const MOST = 3000; // rows at once; the rest behind a button

function isFiltered() {
  return Boolean(state.query || state.rule || state.module || state.kind !== "ALL");
}

function wordsMatch(text) {
  return state.query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function isIn(module) {
  return !state.module || module === state.module || module.startsWith(`${state.module}.`);
}

function nodeMatches(node) {
  return (state.kind === "ALL" || node.kind === state.kind)
    && (!state.rule || node.rule === state.rule) && isIn(node.module) && wordsMatch(node.words);
}

/** Inputs, the result, and lines that the passes removed: no decisions, found by their text. */
function lineMatches(text) {
  return Boolean(state.query) && state.kind === "ALL" && !state.rule && !state.module
    && wordsMatch(text.toLowerCase());
}

/** For each view, what makes the rows of a graph: one function for each row that is shown. */
const VIEWS = {
  decisions(graph) {
    const asked = (node) => (node.counter ? state.kind === "KEEP" || state.query : isFiltered());
    const shown = graph.nodes.filter((node) => nodeMatches(node) && (!(node.added || node.counter) || asked(node)));
    return shown.map((node) => () => decisionRow(node));
  },
  graph(graph) {
    const made = [];
    let fold = { why: "", rows: [] };
    const close = () => { made.push(...folded(graph, fold)); };
    for (const [i, j] of graph.rows) {
      const [name, text] = j === null ? graph.before[i] : graph.after[j];
      const node = j === null ? undefined : NODES.get(keyOf(graph, name));
      const why = whyFolded(node, text);
      if (why !== fold.why) {
        close();
        fold = { why, rows: [] };
      }
      fold.rows.push(() => linesRow(graph, i, j, node));
    }
    close();
    return made;
  },
  backward(graph) {
    const shown = graph.backward.filter((node) => gradientMatches(graph, node));
    return shown.map((node) => () => gradientRow(graph, node));
  },
};

function gradientMatches(graph, node) {
  const forward = NODES.get(keyOf(graph, node.forward));
  const words = `${node.name}\n${node.op}\n${node.forward}\n${forward ? forward.words : ""}`.toLowerCase();
  return (state.kind === "ALL" || node.precision === state.kind)
    && (!state.rule || (forward && forward.rule === state.rule))
    && isIn(forward ? forward.module : "") && wordsMatch(words);
}

function rowButton(kind, key, ...cells) {
  return button({
    class: `row ${kind}`, tabindex: "-1", "data-key": key || null,
    onclick: (event) => { if (key) choose(key, event.detail === 0); },
  }, ...cells);
}

function decisionRow(node) {
  return rowButton("decision", node.key,
    badge(node.kind, node.rule),
    el("span", {}, el("b", { class: "mono" }, breakable(node.name)), el("span", { class: "sub" }, breakable(node.module))),
    el("span", {}, node.reason,
      el("span", { class: "sub mono" }, types(node))));
}

function types(node) {
  return node.captured === node.planned || !node.captured ? node.planned : `${node.captured} → ${node.planned}`;
}

function linesRow(graph, i, j, node) {
  const kind = node ? node.kind : "";
  const before = i === null ? "" : graph.before[i][1];
  const after = j === null ? "" : graph.after[j][1];
  const changed = before && after && before !== after;
  const cells = [
    node ? badge(kind, node.rule) : el("span"),
    lineCell("before", before, before && !after ? "gone" : kind, before && !after ? "−" : ""),
    lineCell("after", after, before || !after ? kind : "ADDED", after && !before ? "+" : changed ? "~" : ""),
  ];
  const made = rowButton("lines", node ? node.key : "", ...cells);
  made.dataset.before = i === null ? "" : graph.before[i][0];
  made.dataset.after = j === null ? "" : graph.after[j][0];
  return made;
}

/** `name: type = call`, in parts; an empty cell if the side has no such line. */
function lineCell(side, text, kind, sign) {
  if (!text) return el("span", { class: side });
  const [, name, type, call] = /^([^:= ]+): (.*?) = (.*)$/s.exec(text) || [];
  const parts = name
    ? [el("b", {}, name), ": ", el("span", { class: "type" }, type), ` = ${call}`] : [text];
  return el("span", { class: `${side} text ${kind}`, "data-sign": sign }, ...parts);
}

/** Why a line may stand folded with its neighbours of the same kind, or "". */
function whyFolded(node, text) {
  if (isFiltered()) return (node ? nodeMatches(node) : lineMatches(text)) ? "" : "that don't match";
  if (text.endsWith(" = input")) return "of inputs and parameters";
  return node && node.added ? `added: ${node.rule}` : "";
}

/** Rows after one that opens them; a few added lines stay in sight. */
function folded(graph, { why, rows }) {
  const added = why.startsWith("added");
  if (!why || (added && rows.length < FOLDED)) return rows;
  const name = `${graph.number}/${state.folds++}`;
  if (opened.has(name)) return rows;
  return [() => button({
    class: added ? "row gap added" : "row gap", tabindex: "-1",
    onclick: () => { opened.add(name); showRows(); },
  }, `⋯ ${rows.length} ${rows.length === 1 ? "line" : "lines"} ${why}`)];
}

function gradientRow(graph, node) {
  const forward = NODES.get(keyOf(graph, node.forward));
  const does = node.recomputed ? "computes again: " : "gradient of ";
  return rowButton("gradient", forward ? forward.key : "",
    badge(node.precision, ""),
    el("span", { class: "mono" }, el("b", {}, node.name), el("span", { class: "sub" }, `${node.result} = ${node.op}`)),
    el("span", {}, node.forward ? does : "torch does not tell which node it belongs to",
      el("b", { class: "mono" }, node.forward),
      el("span", { class: "sub" }, forward ? forward.module : "")));
}

function showRows() {
  const chosen = PLAN.graphs.filter((graph) => state.graph === "all" || graph.number === Number(state.graph));
  const list = byId("rows");
  list.replaceChildren();
  const numbers = TABLES[state.view];
  byId("status").textContent = numbers ? showTable(numbers, chosen) : showList(list, chosen);
  const first = list.querySelector("[tabindex]");
  if (first) first.setAttribute("tabindex", "0");
  mark();
}

function showList(list, graphs) {
  state.folds = 0;
  const made = [];
  let count = 0;
  for (const graph of graphs) {
    const rows = VIEWS[state.view](graph);
    count += rows.length;
    if (PLAN.graphs.length > 1 || graph.left) made.push(() => el("h3", {}, graphTitle(graph)));
    if (state.view === "graph" && rows.length) made.push(columns);
    made.push(...rows);
    if (graph.ends_with) made.push(() => el("p", { class: "row gap" }, `the graph ends here: ${graph.ends_with}`));
  }
  list.append(...made.slice(0, MOST).map((make) => make()));
  if (made.length > MOST) {
    const rest = () => { list.lastChild.remove(); list.append(...made.slice(MOST).map((make) => make())); mark(); };
    list.append(button({ class: "row gap", tabindex: "-1", onclick: rest }, `show ${made.length - MOST} more rows`));
  }
  if (!count) list.append(el("p", { class: "empty-list" }, nothing()));
  return said(graphs, count);
}

function columns() {
  return el("div", { class: "columns lines" }, el("span"), el("span", {}, "as captured"), el("span", {}, "as compiled"));
}

function nothing() {
  if (state.view === "backward" && !PLAN.graphs.some((graph) => graph.backward.length)) {
    return "This plan has no backward: it was made without tracing one.";
  }
  return isFiltered() ? "Nothing matches these filters." : "There is no node here.";
}

function said(graphs, count) {
  if (state.view === "graph") return "− removed, + added, ~ changed";
  const of = { decisions: "nodes", backward: "backward" }[state.view];
  const total = graphs.reduce((sum, graph) => sum + graph[of].length, 0);
  const counters = graphs.some((graph) => graph.nodes.some((node) => node.counter)) ? ", counters under KEEP" : "";
  const hidden = state.view === "decisions" && !isFiltered() ? `; casts, pads and scaling under ADDED${counters}` : "";
  return `${count} of ${total} nodes${hidden}`;
}

function graphTitle(graph) {
  return `graph ${graph.number + 1}${graph.left ? `, left in FP32: ${graph.left}` : ""}`;
}
