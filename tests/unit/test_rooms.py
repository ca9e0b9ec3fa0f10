"""No two folders import each other."""

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.source_code import nodes, statements

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "federation",
    "privacy",
    "cloud_adapters",
    "clients",
    "aggregator",
    "monitoring",
    "deploy",
    "crossfed",
)
STARTS_THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadingHTTPServer"}
MODULES = sorted(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
PATHS = set(MODULES)
ROOMS = sorted({file.parent for file in MODULES})


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


IMPORT = re.compile(r"^ *from ([\w.]+) import (\([^)]*\)|[^\n(]+)", re.MULTILINE)
NO_NAME = re.compile(r"#.*| as \w+")


def imported(file: Path) -> Iterator[Path]:
    """Modules of ours that a module imports, wherever in it.

    Read from its lines, which the formatter writes in one way: to parse the whole
    product takes three seconds.
    """
    for module, members in IMPORT.findall(file.read_text("utf-8")):
        yield from ours(module, re.findall(r"\w+", NO_NAME.sub("", members)))


def ours(module: str, members: Iterable[str]) -> Iterator[Path]:
    for name in (module, *(f"{module}.{member}" for member in members)):
        path = ROOT / (name.replace(".", "/") + ".py")
        if path in PATHS:
            yield path


def starts_threads(file: Path) -> bool:
    text = file.read_text("utf-8")
    return any(name in text for name in STARTS_THREADS) and any(
        isinstance(n, ast.Call)
        and (getattr(n.func, "attr", None) or getattr(n.func, "id", None))
        in STARTS_THREADS
        for n in nodes(file)
    )


def test_no_two_rooms_import_each_other():
    """Nor in a circle of several; a circle raises an error that shows it."""
    rooms = {
        short(room): {
            short(other.parent)
            for file in room.glob("*.py")
            if file.name != "__init__.py"  # A door only hands on.
            for other in imported(file)
            if other.parent != room
        }
        for room in ROOMS
    }
    order = list(TopologicalSorter(rooms).static_order())
    assert order.index("federation") < order.index("deploy/cli")


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_lines_are_read_as_the_parser_reads_them(package: str):
    for file in (ROOT / package).rglob("*.py"):
        parsed = set[Path]()
        for node in statements(file):
            if isinstance(node, ast.ImportFrom) and node.module:
                parsed.update(ours(node.module, (each.name for each in node.names)))
        assert set(imported(file)) == parsed, short(file)


def test_every_module_that_starts_threads_is_in_the_decision_on_threads():
    page = ROOT / "docs" / "adr" / "code-structure.md"
    (table,) = re.findall(
        r"^\| Why .*(?:\n\|.*)+", page.read_text("utf-8"), re.MULTILINE
    )
    told = set(re.findall(r"`([\w/]+\.py)`", table))
    assert told == {short(file) for file in MODULES if starts_threads(file)}
