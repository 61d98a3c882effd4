"""What it would take to change a node's precision, in one sentence for people.

The sentence follows from who decided (`ir.By`, `ir.Role`). A policy overrules the table, the
planner, the guards and autocast regions; it can't change what `classify` keeps as captured, nor
what passes add.
"""

from __future__ import annotations

from ..rules.table import TABLE

# By the word of `Mark.rule`, or "named": the program names the dtype.
# {pin}: the policy that changes this node; {ops}: the one for all nodes of its operator; {why}: the
# reason of the decision.
_SENTENCES = {
    "table": "{pin} changes this node, {ops} all of its operator",
    "named": "its dtype stands in your program: change it there ({why})",
    "plan": "the planner chose by cost: {pin} decides instead, {ops} for all nodes of its operator",
    "region": "{pin} overrules the autocast region that your program put around it; or take the "
    "operator out of that region",
    "guard": "{pin} overrules the guard, and what it prevents may then happen: overflow, zeros or "
    "a large error ({why})",
    "alias": "return a .clone(), so that nothing shares memory; {pin} overrules the rule, but if "
    "results then no longer share memory, the whole graph stays in FP32",
    "kernel": "no policy helps, since the device can't run it ({why}): it takes another low dtype, "
    "a newer torch, or another device",
    "policy": "your own policy decided ({why}): remove the entry, or give it another precision",
    "captured": "no policy changes it ({why}): it keeps the dtypes of your program, and only a "
    "change of the program changes them",
    "update": "no policy changes it ({why}): it keeps the dtypes of your program",
    "cast": "it follows from its two ends ({why}): change the precision of the node that it reads, "
    "or of the one that reads it",
    "scale": "it belongs to the loss scale: loss_scale='none' leaves it out, and in FP16 small "
    "gradients may then become zero",
    "pad": "pad='never' leaves it out, and so does a size in the model that needs no padding",
    "copy": "no policy changes it ({why}): return a .contiguous() result from the model",
    "kept": "it goes if nothing is compared with the value, or with what is made of it ({why})",
    "finite": "in BF16 nothing overflows, and it is left out",
    "layout": "it goes if the node that it reads runs in FP32, whose kernel lays its result out as "
    "your program was traced with",
    "step": "no policy changes it: it is part of an optimizer's step",
}


class Changeable:
    """What a node of a plan is asked for: its attributes of these names."""

    name: str
    op: str
    precision: str
    rule: str
    reason: str
    reads: tuple[str, ...]

    @property
    def change(self) -> str:
        """What it would take to change its precision, in one sentence."""
        return _how_to_change(self)


def _how_to_change(node: Changeable) -> str:
    """One sentence: the option that would change the node, or why none does."""
    if node.rule == "rewrite":
        return (
            f"a pass put it in the place of nodes of your program: disable_passes="
            f"[{_rewriter(node)!r}] brings them back, and a policy can then name them"
        )
    if node.op == "getitem" and node.reads and node.rule not in ("policy", "captured", "update"):
        return f"it is a part of the result of {node.reads[0]}: what changes that changes it, too"
    sentence = _SENTENCES.get(_word(node), "this version of mpcompile can't tell ({why})")
    word, operators = ("fp32", "full") if node.precision == "LOW" else ("low", "low")
    op = node.op.removeprefix("aten::")
    return sentence.format(
        pin=f'Policy(nodes={{"{node.name}": "{word}"}})',
        ops=f'Policy({operators}=["{op}"])',
        why=node.reason,
    )


def _word(node: Changeable) -> str:
    """The key of the node's sentence."""
    names = not node.reads or (node.op in TABLE and TABLE[node.op].converts)
    return "named" if names and node.rule == "table" and node.precision == "KEEP" else node.rule


def _rewriter(node: Changeable) -> str:
    """The pass that made a node of the rule "rewrite"."""
    if node.op == "mpcompile::softmax_low":
        return "narrow_softmax"
    fused = node.op == "mpcompile::linear_cross_entropy" or "_rows" in node.name
    return "fuse_head" if fused else "expand_attention"
