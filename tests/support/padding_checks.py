"""What the tests of padding's exactness share: sizes to draw, how often, and the check itself.

By default a few sizes of each program are drawn. Many of them, at O1 and O2:

    pytest -m sweep tests/padding/test_padding_products.py -n 2

takes about 20 minutes on 2 cores.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from exact import assert_exact
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mpcompile import ir

SIZES = st.integers(1, 67)
FEW = st.integers(1, 19)
EXAMPLES = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking recompiles for minutes
    suppress_health_check=list(HealthCheck),
)


def drawn(few: int, many: int = 100, **strategies: Any) -> Callable[[Any], Any]:
    """A test of a property: on `few` examples by default, on `many` in the whole run."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(examples: int, **given_: Any) -> None:
            def one(**drawn_: Any) -> None:
                check(**drawn_, **given_)

            settings(EXAMPLES, max_examples=examples)(given(**strategies)(one))()

        rest = [p for n, p in inspect.signature(check).parameters.items() if n not in strategies]
        examples = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([examples, *rest])  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__dict__.update(check.__dict__)
        marks = [pytest.mark.sweep("many random sizes")]
        return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=marks)])(test)

    return decorate


def all_aligned(program: Any, *inputs: Any, **options: Any) -> None:
    """Padding is exact, and leaves no dim of any product unaligned."""
    backend = assert_exact(program, *inputs, **options)
    found = [a for g in backend.graphs for n in g.graph.nodes if (a := ir.alignment(n))]
    assert found, "no product in the graph"
    for alignment in found:
        assert alignment.after == (), alignment.reason
        if alignment.before:
            assert alignment.padded
