"""Modules as trees: several tests read the whole product, and parse each file once."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Everything in a module, in the order of ``ast.walk``; the module comes first."""
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))


@cache
def statements(path: Path) -> tuple[ast.AST, ...]:
    """All statements of a module, wherever they are; the module comes first.

    A tenth of all nodes: to walk through the expressions of the whole product takes
    two seconds.
    """
    return tuple(_within(ast.parse(path.read_text("utf-8"))))


def _within(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, part, ())
        for child in inner if isinstance(inner, list) else ():
            yield from _within(child)
