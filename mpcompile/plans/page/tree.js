// The module tree: flat rows with a depth, of which those below a closed module are hidden.

const tree = byId("tree");
const closed = new Set();
const AT_ONCE = 60; // a model with more modules starts with its deeper ones closed

function makeTree() {
  for (const module of PLAN.modules) {
    const depth = module.path ? module.path.split(".").length : 0;
    if (module.parent && depth >= 2 && PLAN.modules.length > AT_ONCE) closed.add(module.path);
    tree.append(treeRow(module, depth));
  }
  tree.firstElementChild.setAttribute("tabindex", "0");
  moveByKeys(tree, () => [...tree.querySelectorAll("li:not([hidden])")]);
  tree.addEventListener("keydown", (event) => {
    const path = event.target.dataset.path;
    if (event.key === "ArrowRight") fold(path, false);
    else if (event.key === "ArrowLeft") fold(path, true);
    else if (event.key === "Enter" || event.key === " ") chooseModule(path);
    else return;
    event.preventDefault();
  });
  byId("open-all").addEventListener("click", () => { closed.clear(); showTree(); });
  byId("close-all").addEventListener("click", () => {
    for (const module of PLAN.modules) if (module.parent && module.path) closed.add(module.path);
    showTree();
  });
  showTree();
}

function treeRow(module, depth) {
  const counts = ["LOW", "FULL", "KEEP"].map((kind) => [kind, module.counts[kind] || 0]);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  const words = counts.filter(([, count]) => count).map(([kind, count]) => `${count} ${kind}`);
  const title = words.join(", ") || "no operator";
  const name = module.path ? module.path.slice(module.path.lastIndexOf(".") + 1) : "model";
  const row = el(
    "li",
    {
      role: "treeitem", tabindex: "-1", class: total ? null : "empty", "data-path": module.path,
      "aria-level": depth + 1, "aria-label": `${name} ${module.kind}: ${title}`, title,
      onclick: () => chooseModule(module.path),
    },
    el("span", { class: "fold", onclick: (event) => {
      if (!module.parent) return;
      event.stopPropagation();
      fold(module.path, !closed.has(module.path));
    } }),
    el("span", { class: "name" }, name),
    el("span", { class: "kind note" }, module.kind),
    el("span", { class: "note" }, total ? String(total) : ""),
    el("span", { class: "mix" }, counts.map(([kind, count]) => {
      const part = el("i", { class: kind });
      part.style.flexGrow = count;
      return part;
    })),
  );
  row.style.setProperty("--depth", depth);
  if (module.parent) row.setAttribute("aria-expanded", "true");
  return row;
}

function fold(path, close) {
  if (close) closed.add(path);
  else closed.delete(path);
  showTree();
}

function showTree() {
  for (const row of tree.children) {
    const path = row.dataset.path;
    row.hidden = parentsOf(path).some((parent) => closed.has(parent));
    row.setAttribute("aria-selected", String(path === state.module));
    if (row.hasAttribute("aria-expanded")) {
      row.setAttribute("aria-expanded", String(!closed.has(path)));
      row.firstElementChild.textContent = closed.has(path) ? "▸" : "▾";
    }
  }
}

function parentsOf(path) {
  if (!path) return [];
  const parts = path.split(".");
  return ["", ...parts.slice(1).map((_, n) => parts.slice(0, n + 1).join("."))];
}
