"""Nests of tuples, lists and dicts: what torch.fx and Dynamo take them for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .private_names import Part, private

if TYPE_CHECKING:
    from torch.utils._pytree import (
        keystr,
        tree_flatten,
        tree_flatten_with_path,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_unflatten,
    )
else:
    _ROOM = "torch.utils._pytree"
    keystr = private(f"{_ROOM}:keystr", "writes the path of a leaf", Part.EXPLAIN)
    tree_flatten = private(f"{_ROOM}:tree_flatten", "takes a nest apart", Part.COMPILE)
    tree_flatten_with_path = private(
        f"{_ROOM}:tree_flatten_with_path", "tells where a leaf stands", Part.EXPLAIN
    )
    tree_leaves = private(f"{_ROOM}:tree_leaves", "lists what is in a nest", Part.COMPILE)
    tree_map = private(f"{_ROOM}:tree_map", "changes each leaf", Part.COMPILE)
    tree_map_only = private(f"{_ROOM}:tree_map_only", "changes the leaves of a type", Part.COMPILE)
    tree_unflatten = private(f"{_ROOM}:tree_unflatten", "puts a nest together", Part.COMPILE)

__all__ = [
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
