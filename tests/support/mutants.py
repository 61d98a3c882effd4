"""Defects of the worst kind: each makes a training wrong, and no error says so.

`tests/support/plant.py` plants each, and runs the tests that must fail then.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A planted defect.

    Attributes:
        name: what it is called on the command line.
        breaks: what goes wrong, in words.
        file: the file that is changed, by its path from the root.
        old: the text there; it stands in the file once.
        new: what it becomes.
        caught_by: files of tests, or single tests. The default run must hold one that fails.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]


MUTANTS = (
    Mutant(
        "softmax-low",
        "the rule of softmax is flipped: it runs in the low dtype",
        "mpcompile/rules/table.py",
        '_row(FULL, _WHY, "softmax _safe_softmax"',
        '_row(LOW, _WHY, "softmax _safe_softmax"',
        ("tests/rules/test_ops.py",),
    ),
    Mutant(
        "result-not-cast",
        "a cast is missing: the caller gets results in the low dtype",
        "passes/graph/place_casts.py",
        "        if ir.dtype(value) == dtype:\n",
        '        if ir.dtype(value) == dtype or user.op == "output":\n',
        ("tests/passes/test_passes_place_casts.py",),
    ),
    Mutant(
        "mask-not-clamped",
        "the cast of an attention mask makes -inf of it, and a masked row NaN",
        "passes/graph/place_casts.py",
        "                if masked:\n",
        "                if False:\n",
        ("tests/passes/test_passes_place_casts.py",),
    ),
    Mutant(
        "not-unscaled",
        "gradients leave a graph times the loss scale",
        "mpcompile/operators/library.py",
        "return grad * scale.reciprocal(), None, overflow",
        "return grad, None, overflow",
        ("tests/hazards/test_hazards_gradients.py",),
    ),
    Mutant(
        "rows-not-looked-at",
        "on a GPU, of the gradients that Inductor writes only the first is looked at for overflows",
        "passes/joint/together.py",
        "bad = ir.new_call(graph, aten.cat.default, rows) if len(rows) > 1 else rows[0]",
        "bad = rows[0]",
        ("tests/passes/test_passes_unscale_together.py",),
    ),
    Mutant(
        "written-though-read",
        "on a GPU a sum is unscaled in place though the backward of a norm reads it, too",
        "passes/joint/together.py",
        "        not gradient.is_read\n",
        "        True\n",
        ("tests/passes/test_passes_unscale_together.py",),
    ),
    Mutant(
        "unscaled-twice",
        "gradients of working copies are divided by the loss scale twice",
        "mpcompile/scaling/low_gradients.py",
        "multiply_all(wide, scale.reciprocal())\n",
        "multiply_all(wide, scale.reciprocal() ** 2)\n",
        ("tests/scaling/test_low_gradients.py",),
    ),
    Mutant(
        "branch-not-scaled",
        "after an autograd.Function the scale is missing in one branch of the gradients",
        "passes/graph/scale_gradients.py",
        "node.replace_input_with(operand, self._scale(operand, node))",
        "pass",
        ("tests/hazards/test_hazards_operators.py",),
    ),
    Mutant(
        "sums-in-low",
        "the sum of a bias gradient is accumulated in the low dtype",
        "passes/joint/widen_weight_gradients.py",
        'node.kwargs = {**node.kwargs, "dtype": torch.float32}',
        "pass",
        ("tests/passes/test_passes_widen_weight_gradients.py",),
    ),
    Mutant(
        "overflow-not-skipped",
        "a compiled step writes parameters though a gradient overflowed",
        "mpcompile/optim/rewrite.py",
        "torch.where(values[SKIPPED], known[slot], kept)",
        "torch.where(values[SKIPPED], kept, kept)",
        ("tests/optim/test_optim_rewrite.py",),
    ),
    Mutant(
        "state-not-kept",
        "a skipped step still moves the optimizer's state",
        "mpcompile/optim/rewrite.py",
        "            if config.checked:\n",
        '            if config.checked and slot.kind == "param":\n',
        ("tests/optim/test_optim_rewrite.py", "tests/optim/test_optim_db.py"),
    ),
    Mutant(
        "guard-removed",
        "a plain optimizer takes a step with gradients that overflowed",
        "mpcompile/scaling/guard.py",
        "skip = upstream or any(answers.values())",
        "skip = upstream",
        ("tests/scaling/test_guard.py",),
    ),
    Mutant(
        "copy-not-written",
        "a step doesn't write the working copy: the model reads the old weights",
        "mpcompile/optim/rewrite.py",
        "copies[slot].copy_(kept.to(copies[slot].dtype))",
        "copies[slot].copy_(copies[slot])",
        ("tests/optim/test_optim_rewrite.py", "tests/scaling/test_copies.py"),
    ),
    Mutant(
        "copy-stale",
        "a master weight that was changed from outside is not read again",
        "mpcompile/scaling/copies.py",
        "return self._seen != _state(master) or self._is_exposed(master)",
        "return self._is_exposed(master)",
        ("tests/scaling/test_copies.py",),
    ),
    Mutant(
        "padded-with-ones",
        "the padding of a product's operands is not zero",
        "passes/graph/place_pads.py",
        "args = (value, amounts)\n",
        "args = (value, amounts, 1.0)\n",
        ("tests/padding/test_padding_products.py",),
    ),
    Mutant(
        "recomputed-from-written",
        "the backward recomputes from an input that the forward has written",
        "passes/joint/kept_for_backward.py",
        "if (write := writes.get(ir.storage_now(node))) is not None:",
        "if (write := None) is not None:",
        ("tests/passes/test_passes_kept_for_backward.py",),
    ),
    Mutant(
        "dropout-drawn-again",
        "a checkpoint that is recomputed drops other elements than the forward did",
        "mpcompile/lower/emitter.py",
        '"preserve_rng_state": True',
        '"preserve_rng_state": False',
        ("tests/hazards/test_hazards_checkpoint.py::test_dropout_is_the_same_when_recomputed",),
    ),
    Mutant(
        "scale-grows-on-overflow",
        "the loss scale is raised where a gradient overflowed",
        "mpcompile/ir/scale.py",
        "scale=_where(lowered, lower, ",
        "scale=_where(lowered, higher, ",
        ("tests/scaling/test_loss_scale.py",),
    ),
    Mutant(
        "lr-ignored",
        "a compiled step keeps the first learning rate",
        "mpcompile/optim/traced_step.py",
        "elif self._stored.get(slot) != value:",
        "elif slot not in self._stored:",
        ("tests/optim/test_optim_settings.py",),
    ),
    Mutant(
        "checkpoint-drops-scale",
        "a checkpoint is loaded without its loss scale",
        "mpcompile/scaling/loss_scale.py",
        "        self.state = live\n        self.restored",
        "        self.restored",
        ("tests/scaling/test_loss_scale.py",),
    ),
    Mutant(
        "accumulated-under-two-scales",
        "a backward divides by the loss scale of now, not by that of its forward",
        "mpcompile/scaling/copies.py",
        "true = unscaled(list(wide.values()), ctx.scale)",
        "true = unscaled(list(wide.values()), ctx.scale and ctx.reader.scale.used)",
        ("tests/scaling/test_low_gradients.py",),
    ),
    Mutant(
        "witness-removed",
        "nobody asks autograd whether a gradient enters a graph unscaled",
        "mpcompile/runtime/graph_call.py",
        "    if tracked:\n",
        "    if False:\n",
        ("tests/hazards/test_hazards_functorch.py::test_autograd_is_asked_in_the_first_call",),
    ),
)
