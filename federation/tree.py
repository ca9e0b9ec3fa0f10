"""Tensors in any nesting: tuples, lists and dicts of tensors, or of arrays.

Each leaf has the records on its first axis. None stands for nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Tree = Any  # a tensor, None, or a tuple, list or dict of trees


def leaves(tree: Tree) -> Iterator[Any]:
    """All leaves of a tree, in the order of its keys."""
    if isinstance(tree, Mapping):
        for part in tree.values():
            yield from leaves(part)
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from leaves(part)
    elif tree is not None:
        yield tree


def named_leaves(name: str, tree: Tree) -> Iterator[tuple[str, Any]]:
    """All leaves of a tree with their places, such as ``inputs['age'][0]``."""
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from named_leaves(f"{name}[{key!r}]", part)
    elif isinstance(tree, (tuple, list)):
        for index, part in enumerate(tree):
            yield from named_leaves(f"{name}[{index}]", part)
    elif tree is not None:
        yield name, tree


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply a function to each leaf, and to those at its place in similar trees."""
    if isinstance(tree, Mapping):
        return {
            key: map_tree(function, part, *(other[key] for other in others))
            for key, part in tree.items()
        }
    if isinstance(tree, (tuple, list)):
        rows = zip(tree, *others, strict=True)
        parts = [map_tree(function, *each) for each in rows]
        return parts if isinstance(tree, list) else tuple(parts)
    return None if tree is None else function(tree, *others)


def num_records(tree: Tree) -> int:
    """Length of the first axis."""
    # Asked at every step, mostly of a single tensor. A search would cost more there,
    # and so would its ``len``, which torch implements in Python.
    leaf = tree if hasattr(tree, "shape") else next(leaves(tree))
    return int(leaf.shape[0]) if hasattr(leaf, "shape") else len(leaf)
