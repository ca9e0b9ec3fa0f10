"""The system clock is made once in a process, and handed down."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from support.source_code import nodes

ROOT = Path(__file__).parents[2]
ROOMS = (
    "aggregator clients cloud_adapters crossfed deploy federation monitoring privacy"
)

# Where a process begins, or a caller of the library may bring none.
DOORS = {
    "crossfed/running.py": 1,
    "deploy/cli/commands.py": 1,
    "deploy/aggregator_host/server_app.py": 1,
    "deploy/aggregator_host/monitor_process.py": 1,
    "deploy/wiring/flower_engine.py": 1,
    "deploy/wiring/simulation.py": 1,
    "deploy/audit/audit.py": 1,
    "cloud_adapters/nginx/processes.py": 1,
    "cloud_adapters/compute/local_node.py": 1,
    # Another process holds the lock: its time is real, whatever clock this one has.
    "federation/folder_lock.py": 1,
}


def made(file: Path) -> int:
    """How often a module makes a system clock."""
    return sum(
        isinstance(node, ast.Call)
        and (getattr(node.func, "attr", None) or getattr(node.func, "id", None))
        == "SystemClock"
        for node in nodes(file)
    )


@pytest.mark.slow
def test_the_system_clock_is_made_where_processes_begin():
    """Elsewhere it is an argument, so that a test can bring another."""
    found = Counter(
        {
            str(file.relative_to(ROOT)): made(file)
            for room in ROOMS.split()
            for file in (ROOT / room).rglob("*.py")
            if "SystemClock" in file.read_text("utf-8")
        }
    )
    assert +found == Counter(DOORS)
