"""Each product of the zoo's models is low, but for those that are listed here with their reason."""

import warnings
from collections import Counter

import pytest
import torch

from benchmarks.zoo.catalogue import HUGGING_FACE, TIMM
from benchmarks.zoo.making import Entry
from mpcompile import compiled_plans, mpcompile

LEFT = {"tnt": {"its memory is written in place": 4}}
"""The tokens of words are written into those of pixels: `patch_embed[:, 1:] += ...`."""

ZOO = {**HUGGING_FACE, **TIMM}


@pytest.mark.sweep("every model of the zoo")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ZOO)
def test_products_are_low(name: str, level: str) -> None:
    assert wide_products(ZOO[name], level) == LEFT.get(name, {})


def wide_products(entry: Entry, level: str) -> dict[str, int]:
    """How many products are FP32, by reason."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mpcompile(entry.build().train(), dtype=torch.bfloat16, level=level, emit="eager")
        entry.loss(model, entry.draw(torch.Generator().manual_seed(0))).backward()
    found: Counter[str] = Counter()
    for plan in compiled_plans(model):
        products = {op.name for op in plan.tensor_cores.ops}
        wide = [n for n in plan.nodes if n.name in products and n.precision != "LOW"]
        found.update(node.reason for node in wide)
        found.update([plan.left] if plan.left else [])
    return dict(found)
