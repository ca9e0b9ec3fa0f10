"""Which functions ``crossfed.patch`` can name to sites."""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from crossfed.patching import _filled, _named
from federation.errors import JobError
from federation.ids import check_name
from federation.job import code_files

nameless = lambda: None  # noqa: E731


def at_the_top() -> None:
    """A function that sites can import."""


@contextlib.contextmanager
def around() -> Iterator[None]:
    """What decorates a function, in the file of contextlib."""
    yield


@pytest.mark.parametrize("function", [functools.partial(at_the_top), nameless])
def test_what_has_no_name_in_a_file_is_refused_with_what_to_do(function: object):
    """A message, where Python has an error without one."""
    with pytest.raises(ValueError, match="top of a file: put"):
        _named(function)


@pytest.mark.parametrize("function", [at_the_top, around()(at_the_top)])
def test_a_function_is_named_by_its_file(
    function: object, monkeypatch: pytest.MonkeyPatch
):
    """By its own, and not by that of its decorator."""
    monkeypatch.setenv(code_files.FOLDERS, "")
    named = code_files.parse(_named(function))
    assert named is not None
    assert (named.module, named.function) == ("test_patching", "at_the_top")


def trainer() -> Any:
    """The arguments of a Trainer that a job takes."""
    args = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=1)
    return SimpleNamespace(args=args)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("./My Script-2.py", "my-script-2"),
        ("./_private.py", "private"),
        ("./__.py", "trainer"),
        (f"./{'x' * 70}.py", "x" * 64),
    ],
)
def test_a_script_of_any_name_makes_a_job_with_one(file: str, name: str):
    found = _filled({"sites": [{"name": "a"}]}, trainer(), f"{file}:make")
    assert found["name"] == check_name(name)
    assert found["data"] == {"source": f"{file}:make"}


@pytest.mark.parametrize("table", ["model", "data", "training"])
def test_what_is_no_table_is_named(table: str):
    with pytest.raises(JobError, match="must be a table") as caught:
        _filled({"sites": [{}], table: "x"}, trainer(), "./a.py:make")
    assert caught.value.key == table


@pytest.mark.parametrize("sites", [3, [1]])
def test_sites_that_are_no_tables_are_left_to_the_job(sites: object):
    assert _filled({"sites": sites}, trainer(), "./a.py:make")["sites"] == sites
