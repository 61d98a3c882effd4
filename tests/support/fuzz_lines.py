"""All lines that a random program may consist of, and programs drawn from them."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Mapping

from fuzz_functorch import FUNCTORCH
from fuzz_grower import Choose, Grower, Maker, Unfit
from fuzz_holes import HOLED
from fuzz_operators import OPERATORS
from fuzz_pointwise import POINTWISE
from fuzz_positions import POSITIONS
from fuzz_programs import Program
from fuzz_regions import SPECIAL
from fuzz_tensors import TENSORS
from fuzz_views import VIEWS
from fuzz_writes import WRITES

RARE = (SPECIAL, FUNCTORCH, POSITIONS, HOLED)  # each a kind of its own, or it would drown
EXPRESSIONS: dict[str, Maker] = {**OPERATORS, **VIEWS, **TENSORS, **POINTWISE}
for _rows in RARE:
    EXPRESSIONS.update(_rows)

# The kinds of lines, the likelier ones several times; a kind is drawn first, then a row.
PRODUCTS = {k: EXPRESSIONS[k] for k in (
    "linear", "linear_bias", "matmul", "mm", "addmm", "bmm", "gram", "einsum", "conv1d", "image",
    "conv2d", "sdpa", "mv", "outer")}  # fmt: skip
NEW = {k: EXPRESSIONS[k] for k in ("created", "filled", "cast", "in_half", "accumulated")}
OTHERS = {
    k: v
    for k, v in EXPRESSIONS.items()
    if not any(k in table for table in (PRODUCTS, VIEWS, NEW, *RARE))
}
KINDS: tuple[Mapping[str, Maker], ...] = (
    OTHERS, PRODUCTS, VIEWS, WRITES, NEW, OTHERS, PRODUCTS, VIEWS, WRITES, WRITES, *RARE,
)  # fmt: skip
HEADERS = (
    "with torch.no_grad():",
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.set_grad_enabled(True):",
)


def generate(choose: Choose, *, longest: int = 14) -> Program:
    """A program; raises Unfit in the rare case that nothing came of it."""
    g = Grower(choose)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("error")
        stack.callback(g.leave, 0)
        for _ in range(3 + choose(longest - 2)):
            form = choose(14)
            if form == 13:
                header = g.of(*HEADERS)
                g.region(header, 1 + choose(3), (EXPRESSIONS, WRITES))
            else:
                g.grow(KINDS[choose(len(KINDS))])
        return g.finish()


def from_seed(seed: int) -> Program:
    """The program of a number."""
    source = random.Random(seed)
    while True:
        with contextlib.suppress(Unfit):
            return generate(source.randrange)


def operators() -> list[str]:
    """Every row of the tables."""
    return sorted({*EXPRESSIONS, *WRITES})
