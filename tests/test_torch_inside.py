"""Private names of torch: one that is gone raises by its name when it is used, and not before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils import _pytree as pytree

from mpcompile.torch_inside.reach import NAMES, MissingInTorch, Part, private

GONE = "torch.utils._pytree:tree_that_never_was"
SAYS = "has no torch.utils._pytree.tree_that_never_was, which counts leaves"


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    """Leaves the table of names as it was."""
    before = dict(NAMES)
    yield
    NAMES.clear()
    NAMES.update(before)


def test_a_name_that_is_there_is_torchs_own() -> None:
    assert private("torch.utils._pytree:tree_map", "maps", Part.SAY) is pytree.tree_map
    assert NAMES["torch.utils._pytree:tree_map"].probe() is pytree.tree_map


def test_another_spelling_is_taken() -> None:
    taken = private(GONE, "counts leaves", Part.SAY, "torch.utils._pytree:tree_leaves")
    assert taken is pytree.tree_leaves


@pytest.mark.parametrize("path", [GONE, "torch._never_was:name", "torch.utils._pytree:TreeSpec.no"])
def test_a_name_that_is_gone_raises_when_it_is_used(path: str) -> None:
    absent = private(path, "counts leaves", Part.SAY)

    class Below(absent):  # type: ignore[misc, valid-type]
        def more(self) -> int:
            return 1

    for use in (
        absent,
        Below,
        lambda: absent.field,
        lambda: isinstance(1, absent),
        lambda: issubclass(int, absent),
        lambda: len(absent),
        lambda: [*absent],
        lambda: 1 in absent,
        lambda: setattr(absent, "field", 1),
        NAMES[path].probe,
    ):
        with pytest.raises(MissingInTorch, match=path.replace(":", ".") + ", which counts leaves"):
            use()


def test_the_message_names_torch() -> None:
    with pytest.raises(MissingInTorch, match=SAYS):
        private(GONE, "counts leaves", Part.SAY)()
