"""Modules as trees: several tests read the whole product, and parse each file once."""

import ast
from functools import cache
from pathlib import Path


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Everything in a module, in the order of ``ast.walk``; the module comes first."""
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))
