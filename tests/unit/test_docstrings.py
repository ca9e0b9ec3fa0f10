"""Entries of docstrings say more than the name that they describe."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation import OURS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted({*OURS, "crossfed", "tools", "benchmarks", "studies"})
SECTION = re.compile(r"^( +)(?:Args|Attributes):\n((?:\1 +.*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^( +)\*{0,2}(\w+): (.+)\n(?!\1 )", re.MULTILINE)
FILLERS = {"a", "an", "its", "of", "that", "the", "this"}


def stems(text: str) -> set[str]:
    """Words of a name or sentence, in the singular."""
    found = re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))
    return {word[:-1] if len(word) > 3 and word[-1] == "s" else word for word in found}


def repetitions(code: str) -> Iterator[str]:
    """Entries of one line that only repeat their own name."""
    for section in SECTION.finditer(code):
        for _, name, description in ENTRY.findall(section[2]):
            if stems(description) <= stems(name) | FILLERS:
                yield f"{name}: {description}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_entry_repeats_its_name(folder: str):
    found = {
        path.relative_to(ROOT).as_posix(): entries
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (entries := list(repetitions(path.read_text(encoding="utf-8"))))
    }
    assert found == {}, "say what a reader needs (unit, shape, which of two)"


def test_repetitions_are_found():
    """In functions and classes; one that continues on the next line is none."""
    code = '''
def f(job, site_names, seed, model):
    """Do it.

    Args:
        job: The job.
        site_names: Names of the sites.
        seed: The seed; below 2^64.
        model: The model
            of the round.
    """


class C:
    """A thing.

    Attributes:
        run_id: Its run ID.
    """
'''
    assert list(repetitions(code)) == [
        "job: The job.",
        "site_names: Names of the sites.",
        "run_id: Its run ID.",
    ]
