"""TOML of other parties: what is refused before it is parsed."""

import tomllib

import pytest

from federation.clock import SystemClock
from federation.job.job_file import MAX_KEY_PARTS, loads_toml as loads

DEEP = ".".join("a" * (MAX_KEY_PARTS + 1))


@pytest.mark.parametrize(
    "text",
    [
        f"{DEEP} = 1",
        f"[{DEEP}]",
        f"[[{DEEP}]]",
        f"x = {{ {DEEP} = 1 }}",
        f'x = """\n"""\n{DEEP} = 1',
        f'x = """"""\n{DEEP} = 1',
        f'x = """a"""""\n{DEEP} = 1',
        f"x = '''a'''''\n{DEEP} = 1",
        f'x = "\\\\"\n{DEEP} = 1 # "',
        f'x = 1 # """\n{DEEP} = 1',
        f"x = '#'\n{DEEP} = 1",
        " \t. ".join(["a", '"b.c"', "'d.#'"] * 12) + " = 1",
    ],
)
def test_keys_of_many_parts_are_refused(text: str):
    assert tomllib.loads(text)
    with pytest.raises(ValueError, match=f"more than {MAX_KEY_PARTS} parts"):
        loads(text)


@pytest.mark.parametrize(
    "text",
    [
        f"{DEEP[2:]} = 1",
        f"x = '{DEEP}'",
        f'x = "{DEEP}\\" {DEEP}"',
        f'x = """\n" {DEEP} \\""" {DEEP}\n"""',
        f"# {DEEP}",
        "x = [" + "0.25, " * 1000 + "]",
        '"' + DEEP + '" = 1',
    ],
)
def test_other_dots_are_not_counted(text: str):
    assert loads(text) == tomllib.loads(text)


@pytest.mark.parametrize("text", ["a = " + "[" * 9999, "a = " + "9" * 9999, "a ="])
def test_what_is_not_toml_is_one_error(text: str):
    with pytest.raises(ValueError, match=r"\w"):
        loads(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    ["a.", "a .", '"', "'", '\\"', '"\\"', "a", "-", '""".', "#", "\n'''", "x='.", " "],
)
def test_no_text_takes_long(unit: str):
    """A megabyte of it; with time by the square, this would take minutes."""
    begin = SystemClock().monotonic()
    for first in ("", 'x = "', "a."):
        with pytest.raises(ValueError, match=r"\w"):
            loads(first + unit * (1_000_000 // len(unit)) + "\0")
    assert SystemClock().monotonic() - begin < 20
