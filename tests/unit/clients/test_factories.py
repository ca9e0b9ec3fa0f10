"""Importing and calling ``module:function`` strings."""

import ast
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.factories import call_factory, import_factory
from federation.errors import JobError, SiteError

ROOT = Path(__file__).resolve().parents[3]


def area(width: float, height: float = 2):
    return width * height


def broken(width: float):
    return width + "not a number"


def test_factory_is_imported():
    """A well-formed path gives the very function that it names."""
    assert math.sqrt is import_factory("math:sqrt")


@pytest.mark.parametrize(
    "path", ["math", "math.sqrt", "math:", ":sqrt", "a b:c", "math:sqrt:x", "x.py:f"]
)
def test_other_forms_are_refused(path: str):
    """What is not ``module:function`` is refused with an example of what is."""
    with pytest.raises(JobError, match="not of the form module:function"):
        import_factory(path)


@pytest.mark.parametrize("name", ["no_such_module", "no_such_module.part"])
def test_missing_module_is_named(name: str):
    """The message says which module is missing, and the error keeps the key."""
    with pytest.raises(JobError, match="no module 'no_such_module'") as caught:
        import_factory(f"{name}:f", key="data.source")
    assert caught.value.key == "data.source"


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a module of a user and return its name."""

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return write


def test_missing_dependency_is_told_from_missing_module(
    user_module: Callable[[str, str], str],
):
    """A user's module that imports something absent is not itself called absent."""
    name = user_module("crossfed_needy", "import no_such_dependency\n")
    with pytest.raises(JobError, match="needs 'no_such_dependency'"):
        import_factory(f"{name}:f")


def test_module_that_fails_on_import(user_module: Callable[[str, str], str]):
    """An error in a user's module becomes a job error that keeps its cause."""
    name = user_module("crossfed_failing", "1 / 0\n")
    with pytest.raises(JobError, match="ZeroDivisionError") as caught:
        import_factory(f"{name}:f")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_nearest_name_is_suggested():
    """A misspelt function is answered with names like it."""
    with pytest.raises(JobError, match=r"has no 'sqr'; did you mean .*sqrt"):
        import_factory("math:sqr")


def test_unknown_option_is_named_with_the_known_ones():
    """A misspelt option is answered with its neighbour and the whole list."""
    with pytest.raises(
        JobError, match=r"'hight'.*mean height\?.*options are width, height"
    ) as caught:
        call_factory(area, {"width": 1, "hight": 2}, key="model.options")
    assert caught.value.key == "model.options"


def test_error_inside_the_factory_keeps_its_cause():
    """A TypeError of the function's own code is not blamed on the options."""
    with pytest.raises(SiteError, match="broken failed with TypeError") as caught:
        call_factory(broken, {"width": 1})
    assert isinstance(caught.value.__cause__, TypeError)


def test_only_one_function_imports_by_a_name_of_the_job():
    """Otherwise a site's policy would not see the name."""
    importing = {
        *("importlib.import_module", "import_module", "__import__", "exec", "eval"),
        *("runpy.run_path", "runpy.run_module", "pkgutil.resolve_name"),
    }
    found = set()
    for package in ("clients", "privacy", "federation", "aggregator"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                if called in importing and not isinstance(node.args[0], ast.Constant):
                    found.add(path.relative_to(ROOT).as_posix())
                if called == "import_factory":  # No name is put together.
                    text = node.args[0]
                    kinds = ast.Name | ast.Attribute | ast.Subscript
                    assert isinstance(text, kinds), f"{path}:{node.lineno}"
    assert found == {"clients/factories.py"}
