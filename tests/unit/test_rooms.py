"""Each folder is one subject: few modules, and no two folders import each other."""

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
MOST_MODULES = 22
STARTS_THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadingHTTPServer"}
IRREGULAR = re.compile(
    "Broken|Drawn|Found|Given|Gone|Held|Hidden|Kept|Known|Lost|Made|Met|Passing|Said|"
    "Seen|Sent|Shown|Spent|Taken|Told|Withdrawn|Written"
)
MODULES = sorted(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
PATHS = set(MODULES)
ROOMS = sorted({file.parent for file in MODULES})


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


IMPORT = re.compile(r"^ *from ([\w.]+) import (\([^)]*\)|[^\n(]+)", re.MULTILINE)
NO_NAME = re.compile(r"#.*| as \w+")
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)


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


def test_a_room_is_small():
    sizes = {
        short(room): len({*room.glob("*.py")} - {room / "__init__.py"})
        for room in ROOMS
    }
    large = {room: size for room, size in sizes.items() if size > MOST_MODULES}
    assert large == {}, "give some of their modules a folder"


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


def classes() -> Iterator[tuple[str, str]]:
    """Name of each class, and the module that defines it."""
    for file in MODULES:
        for name in CLASS.findall(file.read_text("utf-8")):
            yield name.lstrip("_"), short(file)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_lines_are_read_as_the_parser_reads_them(package: str):
    for file in (ROOT / package).rglob("*.py"):
        parsed = set[Path]()
        for node in statements(file):
            if isinstance(node, ast.ImportFrom) and node.module:
                parsed.update(ours(node.module, (each.name for each in node.names)))
        assert set(imported(file)) == parsed, short(file)
        assert CLASS.findall(file.read_text("utf-8")) == [
            node.name for node in statements(file) if isinstance(node, ast.ClassDef)
        ], short(file)


def test_a_class_name_is_defined_once():
    """A private class does not borrow a public one's name either."""
    found = dict[str, list[str]]()
    for name, file in classes():
        found.setdefault(name, []).append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    "name",
    ["budget", "comparison", "keys", "ledger", "run_result", "trainer", "transcript"],
)
def test_a_subject_has_one_module_of_its_name(name: str):
    """Two folders do not both keep what a reader looks for under one word."""
    assert len([file for file in MODULES if file.stem == name]) <= 1


def test_no_class_is_named_with_a_bare_participle():
    """A class is a thing. Events say what happened, and stand in the logs of runs."""
    names = {name for name, file in classes() if file != "federation/events.py"}
    regular = {n for n in names if re.fullmatch("[A-Z][a-z]*[^e]ed", n)}
    assert regular | set(filter(IRREGULAR.fullmatch, names)) == set()


def test_every_module_that_starts_threads_is_in_the_decision_on_threads():
    (page,) = (ROOT / "docs" / "adr").glob("0005-*.md")
    told = set(re.findall(r"`([\w/]+\.py)`", page.read_text("utf-8")))
    told -= {"tests/unit/test_rooms.py"}
    assert told == {short(file) for file in MODULES if starts_threads(file)}
