"""Flower's private modules are imported in one folder, and nowhere else.

A new minor version of Flower may change what it names: that is the place to look at.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.source_code import nodes

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "aggregator",
    "clients",
    "cloud_adapters",
    "crossfed",
    "deploy",
    "monitoring",
    "privacy",
)
PUBLIC = {"flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
PRIVATE = "cloud_adapters/flower/private/"


def modules(parts: Iterable[ast.AST]) -> set[str]:
    """Modules of Flower that a program imports, wherever it does."""
    found = set()
    for node in parts:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and node.args:
            name = node.args[0]  # Of import_module, or what else loads one.
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(name.value)
    return {name for name in found if name.partition(".")[0] == "flwr"}


def test_private_modules_of_flower_are_imported_in_one_folder():
    """As the decision on nodes says (docs/adr/wire-and-flower.md)."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in files
        # To walk through all of them takes seconds.
        if "flwr" in path.read_text("utf-8") and modules(nodes(path)) - PUBLIC
    }
    assert found
    assert {name for name in found if not name.startswith(PRIVATE)} == set()


@pytest.mark.parametrize(
    "text",
    [
        "import flwr.supercore.fab",
        "from flwr.supercore.fab import Fab",
        "def f():\n    from flwr.supercore import fab",
        'module = importlib.import_module("flwr.supercore.fab")',
    ],
)
def test_imports_are_found_wherever_they_are(text: str):
    assert modules(ast.walk(ast.parse(text))) - PUBLIC
    public = ast.parse("from flwr.app import Message")
    assert modules(ast.walk(public)) <= PUBLIC
