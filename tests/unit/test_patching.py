"""Which functions ``crossfed.patch`` can name to sites."""

import contextlib
import functools
from collections.abc import Iterator

import pytest

from crossfed.patching import _named
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
    with pytest.raises(ValueError, match="at the top of a file: put one there"):
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
