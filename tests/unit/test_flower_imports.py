"""Flower's private modules are known to the files that are named here, and no others.

A new minor version of Flower may change what they use: these are the places to look at.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("aggregator", "clients", "cloud_adapters", "deploy", "monitoring", "privacy")
PUBLIC = {"flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
KNOW_PRIVATE = {
    # At a site.
    "cloud_adapters/flower/connection.py",
    "cloud_adapters/flower/fleet.py",
    "cloud_adapters/flower/node.py",
    # On the aggregator's host.
    "cloud_adapters/superlink/control.py",
    "cloud_adapters/superlink/gate.py",
    "cloud_adapters/superlink/guard.py",
    "cloud_adapters/superlink/launcher.py",
    "cloud_adapters/flower/presence.py",
    "cloud_adapters/flower/runtime.py",
    # At both.
    "cloud_adapters/flower_apps/bundle.py",
    "cloud_adapters/flower/envelope.py",
}


def modules(text: str) -> set[str]:
    """Modules of Flower that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name for name in found if name.partition(".")[0] == "flwr"}


def test_private_modules_of_flower_have_few_users():
    """As the decision on nodes says (docs/adr/0017)."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if modules(path.read_text(encoding="utf-8")) - PUBLIC
    }
    assert found == KNOW_PRIVATE
