"""Random programs on values of 64 x 128 and 4 x 64 x 96: the sizes at which kernels have tiles.

Each line is run as soon as it is drawn, in FP32 and backward, too; one that torch refuses, or whose
values or gradients leave a modest range, is taken back. The programs of fuzz_lines.py do more
kinds of things, but their sizes, 4 x 8, are written into their lines.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from verified_runs import Subject

LINES = (4, 10)
LARGEST = 30.0
FLAT, DEEP = (64, 128), (4, 64, 96)
INPUTS = {
    "x0": FLAT, "x1": FLAT, "x2": DEEP, "x3": DEEP, "w0": (128, 128), "w1": (96, 96),
    "v0": (128,), "v1": (96,), "k0": (64, 64, 3), "i0": (64,),
}  # fmt: skip
SCOPE = {"torch": torch, "F": F}

UNARY = (
    "{a}.sin()", "{a}.tanh()", "{a}.sigmoid()", "F.gelu({a})", "F.silu({a})", "{a}.relu()",
    "(-{a}.abs()).exp()", "{a}.square() * 0.25", "({a}.square() + 1).rsqrt()", "F.softplus({a})",
    "{a}.erf()", "F.leaky_relu({a}, 0.1)", "F.hardtanh({a})", "{a}.abs().log1p()", "F.elu({a})",
    "{a}.clamp(-0.5, 0.75)", "{a} * 0.5 + 0.25", "F.gelu({a}, approximate='tanh')", "F.mish({a})",
    "F.hardswish({a})", "{a}.masked_fill({a} > 0.5, 0.25)", "1 - {a}", "{a}.reciprocal().tanh()",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} * {b}", "{a} - {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})", "torch.where({a} > {b}, {a}, {b} * 0.5)", "{a}.lerp({b}, 0.25)",
    "torch.atan2({a}, {b}.abs() + 1)", "torch.hypot({a}, {b})", "{a} * {b} + {a}",
    "torch.where(({b} > 0) & ({a} < 1), {a}.sin(), {b})", "torch.logaddexp({a}, {b})",
    "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}]).mean(0)",
)  # fmt: skip
REDUCED = (
    "{a}.sum({d}, keepdim=True) * 0.05", "{a}.mean({d}, keepdim=True)",
    "{a}.amax({d}, keepdim=True)",
    "{a}.amin({d}, keepdim=True)", "{a}.var({d}, keepdim=True)", "{a}.logsumexp({d}, keepdim=True)",
    "{a}.norm(dim={d}, keepdim=True) * 0.1", "{a}.max({d}, keepdim=True).values",
    "{a}.norm(p=1, dim={d}, keepdim=True) * 0.02", "{a}.std({d}, keepdim=True)",
)  # fmt: skip
ALONG = (
    "{a} - {r}",
    "{a} * {r}",
    "{a} / ({r}.abs() + 1)",
    "torch.where({a} > {r}, {a}, 0.0)",
    "({a} - {r}).tanh() + {r}",
    "{a} + {r}.square()",
)
NORMS = (
    "F.layer_norm({a}, ({n},))", "F.rms_norm({a}, ({n},))", "{a}.softmax({d})",
    "{a}.log_softmax({d}) * 0.2", "F.normalize({a}, dim={d})",
    "F.layer_norm({a}, ({n},), {v}, {v})",
    "F.group_norm({a}, 4)", "F.batch_norm({a}, None, None, training=True)", "{a} * {v}",
    "{a} + {v}",
)  # fmt: skip
MOVED = (
    "{a}.transpose(-1, -2)", "{a}.mT.contiguous()", "{a}.flip({d})", "{a}.roll(3, {d})",
    "{a}[..., ::2]", "{a}[..., 1:, :]", "F.pad({a}, (1, 1))", "{a}.chunk(2, {d})[1]",
    "{a}.flatten(0, -2)", "{a}.reshape(-1, 32)", "{a}.unsqueeze(0).expand(2, *[-1] * {a}.dim())",
    "{a}.repeat_interleave(2, {d})", "{a}.unflatten(-1, (-1, 16)).sum(-2) * 0.2",
    "{a}.movedim(0, -1)", "torch.cat([{a}.mT, {a}.mT * 0.5], -1)", "{a}.tril()",
    "{a}.diff(dim={d})",
)  # fmt: skip
INDEXED = (
    "{a}[..., i0, :]", "{a}.index_select(-1, i0)", "{a}.gather({d}, {a}.argsort({d}))",
    "{a}.gather({d}, {a}.argmax({d}, keepdim=True)) + {a}", "{a}.topk(8, -1).values",
    "{a}.sort({d}).values", "{a}.cumsum({d}) * 0.05", "{a}.index_add(-1, i0 % 8, {a}[..., :64])",
    "F.embedding(i0, {a})", "{a}.take_along_dim({a}.argmin({d}, keepdim=True), {d})",
    "{a}.scatter_add(-1, {a}.argsort(-1), {a} * 0.5)", "{a}.cummax({d}).values",
)  # fmt: skip
PRODUCTS = (
    "{a} @ {w} * 0.1",
    "F.linear({a}, {w} * 0.1, {v})",
    "{a} @ {b}.mT * 0.1",
    "({a} @ {a}.mT * 0.1).softmax(-1) @ {a}",
    "F.conv1d({a}, k0 * 0.1, padding=1)",
    "F.scaled_dot_product_attention({a}, {b}, {a})",
    "torch.einsum('...ij,...kj->...ik', {a}, {b}) * 0.1",
)
POOLS = (
    "F.avg_pool1d({a}, 2)", "F.max_pool1d({a}, 2)", "F.max_pool2d({a}.reshape(1, -1, 32, 64), 2)",
    "F.avg_pool2d({a}.reshape(1, -1, 32, 64), 3, 2)", "F.adaptive_avg_pool1d({a}, 24)",
    "F.max_pool2d({a}.reshape(-1, 1, 16, 64), 3, 2, 1)",
    "F.interpolate({a}.reshape(1, -1, 64), 96)",
    "F.adaptive_max_pool2d({a}.reshape(-1, 1, 64, 32), 8)",
    "F.unfold({a}.reshape(1, -1, 32, 32), 2)",
)  # fmt: skip
TABLES = (
    UNARY,
    UNARY,
    BINARY,
    BINARY,
    REDUCED,
    ALONG,
    NORMS,
    MOVED,
    MOVED,
    INDEXED,
    PRODUCTS,
    POOLS,
)


class _Unfit(Exception):
    """Nothing is there that a line could be about."""


class _Grower:
    """A program under construction, with the values that its lines have made."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.values = dict(zip(INPUTS, _inputs(0), strict=True))
        self.lines: list[str] = []
        self.large: list[str] = []
        self.reduced: list[str] = []
        self.unread: set[str] = set()

    def grow(self) -> None:
        """Begin in the low dtype, as after a layer; then draw lines."""
        pairs = (("x0", "x1"), ("x2", "x3"), ("x0", "x2"))
        for name in self.choose.choice(pairs):
            weight = "w0" if name in ("x0", "x1") else "w1"
            low = f"F.prelu({name}, v0[:1].abs())", f"{name} @ {weight} * 0.1"
            self.add(self.choose.choice(low))
        wanted = len(self.lines) + self.choose.randint(*LINES)
        for _ in range(200):
            if len(self.lines) < wanted:
                self.draw_line()

    def draw_line(self) -> None:
        table = self.choose.choice(TABLES)
        form = self.choose.choice(table)
        try:
            self.add(self._filled(form), reduced=table is REDUCED)
        except Exception:  # whatever torch says to it
            return

    def add(self, expression: str, reduced: bool = False) -> None:
        name = f"y{len(self.lines)}"
        value = eval(expression, {**SCOPE, **self.values})
        size = value.detach().abs().amax()
        if not (size <= LARGEST and 64 <= value.numel() <= 1 << 18):  # NaN too
            raise _Unfit
        leaves = [v for v in self.values.values() if v.is_leaf and v.requires_grad]
        found = torch.autograd.grad(value.sum(), leaves, allow_unused=True, retain_graph=True)
        if not all(g is None or g.abs().amax() <= 1000 * LARGEST for g in found):
            raise _Unfit
        self.lines.append(f"{name} = {expression}")
        self.values[name] = value
        (self.reduced if reduced else self.large).append(name)
        self.unread = {n for n in self.unread if n not in expression} | {name}

    def _filled(self, form: str) -> str:
        a = self._recent(self.large)
        size = self.values[a].shape
        given: dict[str, Any] = {"a": a, "d": self.choose.randint(-len(size), -1), "n": size[-1]}
        if "{b}" in form:
            given["b"] = self._recent([n for n in self.large if self.values[n].shape == size])
        if "{r}" in form:
            fits = [n for n in self.reduced if _broadcasts(self.values[n].shape, size)]
            given["r"] = self._recent(fits)
        if "{v}" in form or "{w}" in form:
            given |= {"v": _by_width(size[-1], "v"), "w": _by_width(size[-1], "w")}
        return form.format(**given)

    def _recent(self, names: Sequence[str]) -> str:
        if not names:
            raise _Unfit
        return self.choose.choice(names[-3:] if self.choose.random() < 0.7 else names)

    def source(self) -> str:
        made = [line.split(" = ")[0] for line in self.lines]
        results = [n for n in made if n in self.unread] or made[-1:]
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({', '.join(INPUTS)}):\n{body}    return {', '.join(results)},\n"


def _by_width(width: int, kind: str) -> str:
    number = {128: 0, 96: 1}.get(width)
    if number is None:
        raise _Unfit
    return f"{kind}{number}"


def _broadcasts(size: Sequence[int], to: Sequence[int]) -> bool:
    return len(size) == len(to) and all(a in (1, b) for a, b in zip(size, to, strict=True))


def _inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: list[torch.Tensor] = []
    for name, size in INPUTS.items():
        if name.startswith("i"):
            made.append(torch.randint(64, size, generator=generator))
        else:
            made.append(torch.randn(size, generator=generator).requires_grad_())
    return made


def subject_of(number: int) -> Subject:
    """The program of a number."""
    grower = _Grower(number)
    grower.grow()
    source = grower.source()
    scope: dict[str, Any] = {}
    # The name of the file tells one program from the next in Dynamo's caches and in our warnings.
    exec(compile(source, f"<program {number}>", "exec"), SCOPE.copy(), scope)
    program: Callable[..., Any] = scope["program"]
    return Subject(f"program {number}", program, _inputs, source)
