"""Decide the FOLLOW nodes: LOW or FULL. A deciding pass; afterwards no node is FOLLOW.

The pass makes one minimum cut over the whole graph. `mpcompile/planner/objective.py` has its
objective, term by term and with units: bytes of values that are stored or kept for the backward,
casts that no fusion absorbs, measured times of products that a device profile covers. The nodes
that a rule, the user, a guard or the level has pinned are the terminals. If a product comes out
FULL at O2, it is pinned and the cut is made again: values were low for the sake of that product.

    linear: LOW -> gelu -> linear: LOW         gelu is LOW: FULL would take two casts
    linear: LOW -> gelu -> mean: FULL          gelu is FULL: FP32 arithmetic is free in a kernel
    x: FP32 -> add(linear: LOW) -> ...         at O1 FULL: an accumulating path stays FP32;
                                               at O2 LOW: it is stored, for the next block and for
                                               the backward, in half the bytes
    linear 64x32x32                            FULL on a CPU whose profile says that BF16 is slower

Views and moves do no arithmetic. A view takes part in the cut, so that a cast comes on the cheaper
side of it; a move reads its table in the table's dtype.

O3: everything that is not pinned is LOW.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from mpcompile import ir, rules
from mpcompile.ir.text import scaled
from mpcompile.planner.constraints import Item, Rounded
from mpcompile.planner.min_cut import NEVER, MinimumCut
from mpcompile.planner.objective import DOUBT, UNIT, Objective
from mpcompile.rules.policy import Config, Level, Precision

LOW, FULL, FOLLOW = Precision.LOW, Precision.FULL, Precision.FOLLOW


def plan(gm: fx.GraphModule, config: Config) -> bool:
    if config.level is Level.O3:
        _lower_everything(gm.graph, config)
        return False
    objective = Objective(gm.graph, config)
    cut, best = _cut(objective)
    while config.level is Level.O2 and (slower := _products_in_full(best)):
        # At O2 values may be low only because low products are near: pin the slower products first.
        for node in slower:
            _settle(objective, node, best, low=False)
            ir.min_cut.set(node, cut)
        objective = Objective(gm.graph, config)
        cut, best = _cut(objective)
    for item, low in best.items():
        ir.min_cut.set(item.node if isinstance(item, Rounded) else item, cut)
        if not isinstance(item, Rounded):
            _settle(objective, item, best, low=low)
        elif low:
            _store_low(objective, item.node)
    return False


def _products_in_full(best: Mapping[Item, bool]) -> list[fx.Node]:
    """The products that a rule made LOW and that cost less in FP32."""
    nodes = (item for item, low in best.items() if isinstance(item, fx.Node) and not low)
    return [node for node in nodes if ir.precision(node) is LOW]


def _settle(objective: Objective, node: fx.Node, best: Mapping[Item, bool], *, low: bool) -> None:
    if ir.precision(node) is FOLLOW or not low:
        reason = _reason(objective, node, best, low)
        ir.remark(node, precision=LOW if low else FULL, by=ir.By.PLAN, reason=reason)


def _cut(objective: Objective) -> tuple[MinimumCut, dict[Item, bool]]:
    """The cut, and which of the open items are LOW at the least total cost."""
    items, is_low = objective.constraints.open, objective.constraints.is_low
    number = {item: i for i, item in enumerate(items)}
    low = [dict(objective.terms[item].low) for item in items]
    full = [dict(objective.terms[item].full) for item in items]
    pairs: list[tuple[int, int, int, int]] = []
    for (operand, reader), costs in objective.pairs.items():
        a, b = number.get(operand), number.get(reader)
        if a is not None and b is not None:
            pairs.append((a, b, *costs))
            continue
        known, item = (operand, b) if a is None else (reader, a)  # one end is decided already
        assert item is not None
        there = bool(is_low(known))
        cost = costs[there is not (a is None)]  # if the item differs from it
        term = "cast" if cost < NEVER else f"{known.name} is FP32"
        side = full[item] if there else low[item]
        side[term] = side.get(term, 0) + cost
    cut = MinimumCut(tuple(item.name for item in items), tuple(low), tuple(full), tuple(pairs))
    return cut, dict(zip(items, cut.best(), strict=True))


def _store_low(objective: Objective, node: fx.Node) -> None:
    saved = objective.terms[Rounded(node)].full.get("stored", 0) // UNIT
    less = f"its result is stored low, {scaled(saved, 'B', 1)} less traffic"
    reason = f"{ir.mark(node).reason}; {less}"
    ir.is_stored_low.set(node, True)
    ir.remark(node, reason=reason)


def _reason(objective: Objective, node: fx.Node, best: Mapping[Item, bool], low: bool) -> str:
    """Why the node got its precision: the first term that suffices to decide it."""
    costs, rule = objective.terms[node], ir.mark(node).reason
    if "time" in costs.low and not low:
        return f"{rule}; but {_why_full(objective, node, best)}"
    if "one number" in costs.low:
        return f"{rule}; one number: FP32 costs nothing"
    if "no operand" in costs.low:
        return f"{rule}; FP32 in"
    if "residual stream" in costs.low:
        return f"{rule}; a residual stream: FP32 as at O1"
    wide = [n.name for n in objective.constraints.forced_by(node) if ir.precision(n) is not LOW]
    if wide and not low:
        return f"{rule}; promoted, since {wide[0]} is FP32"
    if ir.kind(node) is rules.Kind.VIEW:
        return f"{rule}; a cast costs less {'before' if low else 'after'} it"
    stored = costs.full.get("stored", 0) // UNIT
    if low and stored:
        return f"{rule}; stored: FP32 would take {scaled(stored, 'B', 1)} more traffic"
    if low:
        return f"{rule}; beside low values: no cast"
    return f"{rule}; nothing stores it: FP32 is free in its kernel"


def _why_full(objective: Objective, node: fx.Node, best: Mapping[Item, bool]) -> str:
    """Why a product with predicted times is FULL: both sides of the sum, in words.

        FP32 costs less: estimated 0.0335 ms, low 0.0168 ms and 0.0921 ms for the casts it needs
        (device profile)

    The casts are those at the product itself, while its neighbours stay as they were decided.
    """

    def ms(cost: int) -> str:  # a cost, as the time in which memory moves so many bytes
        assert objective.config.profile is not None
        return f"{cost / UNIT / objective.config.profile.bandwidth * 1e3:.3g} ms"

    costs = objective.terms[node]
    low, full = costs.low["time"], costs.full["time"]
    casts, wider = costs.low.get("weights", 0), costs.full.get("stored", 0)
    for (operand, reader), (up, down) in objective.pairs.items():
        if node in (operand, reader):
            other, at_low, at_full = (reader, up, down) if operand is node else (operand, down, up)
            if best[other] if other in best else objective.constraints.is_low(other):
                wider += at_full
            else:
                casts += at_low if at_low < NEVER else 0
    wider = wider if wider < NEVER else 0
    why, more = "FP32 is faster", ""
    if low < full:
        sure = low + casts >= full + wider
        doubtful = f"low saves less than a prediction is off by, 1/{DOUBT}"
        why = "FP32 costs less" if sure else doubtful
        more = f" and {ms(casts)} for the casts it needs" if casts else ""
    seen = bool(more) and wider * 100 > full
    there = f" and {ms(wider)} for wider values" if seen else ""
    return f"{why}: estimated {ms(full)}{there}, low {ms(low)}{more} (device profile)"


def _lower_everything(graph: fx.Graph, config: Config) -> None:
    for node in graph.nodes:
        pinned = ir.precision(node) is FULL and ir.mark(node).by is ir.By.TABLE
        if pinned and config.has_kernel(node):
            ir.remark(node, precision=LOW, by=ir.By.PLAN, reason="O3: everything low")
    for node in graph.nodes:
        if ir.precision(node) is FOLLOW:
            low = ir.kind(node) is rules.Kind.COMPUTE or _reads_low(node)
            reason = f"{ir.mark(node).reason}; O3: everything low"
            ir.remark(node, precision=LOW if low else FULL, by=ir.By.PLAN, reason=reason)


def _reads_low(node: fx.Node) -> bool:
    """Whether all operands of a view or a move are low."""
    narrow = [n for n in node.all_input_nodes if ir.was_f32(n) or ir.is_getitem(n)]
    return bool(narrow) and all(ir.precision(n) is LOW for n in narrow)
