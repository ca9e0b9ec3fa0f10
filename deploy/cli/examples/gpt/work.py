"""Python's standard library as bytes: its sources, and signatures with docstrings."""

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from clients.data import Examples, preprocessing, text_folder

CONTEXT = 128  # Bytes that the model sees.
IGNORED = -100  # The label of a byte that is not to be learned.
END = 0  # A byte that ends an answer, and pads.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
HELD_OUT = 10  # One function in so many is held out.

Rows = NDArray[np.int64]


@preprocessing("none")
def sources(max_bytes: int = 600_000) -> tuple[Examples, Examples]:
    """Windows of source text ``(n, 129)``, grouped by package: (train, held_out)."""
    return text_folder(context=CONTEXT, max_bytes=max_bytes)


@preprocessing("none")
def docstrings(
    part: int = 0, parts: int = 1, most: int = 800
) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Functions: bytes ``(n, 128)``, and labels for the docstring only.

    Place ``t`` of the labels is byte ``t`` of the text; the task ``sft`` shifts them.

    Args:
        part: Number of the site, from 0.
        parts: Number of sites; a hash of the signature decides which one has it.
        most: Functions for training; about a ninth as many are held out.
    """
    rows: dict[bool, list[tuple[Rows, Rows]]] = {True: [], False: []}
    for prompt, answer in functions():
        drawn = crc32(prompt.encode())
        if drawn // HELD_OUT % parts == part:
            rows[drawn % HELD_OUT == 0].append(_row(prompt, answer))
        if len(rows[False]) == most:
            break
    train, held_out = (
        (np.stack([ids for ids, _ in some]), np.stack([labels for _, labels in some]))
        for some in (rows[False], rows[True])
    )
    return train, held_out


def functions() -> Iterator[tuple[str, str]]:
    """Signature and first line of the docstring, of functions of the library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            yield from _functions_of(path.read_bytes())


def _functions_of(code: bytes) -> Iterator[tuple[str, str]]:
    with warnings.catch_warnings():  # About escapes in old sources.
        warnings.simplefilter("ignore")
        tree = ast.parse(code)
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if text and isinstance(node, ast.FunctionDef):
            yield prompt_of(f"{node.name}({ast.unparse(node.args)})"), _first_line(text)


def prompt_of(signature: str) -> str:
    """What the model continues with a docstring."""
    return f'def {signature[:60]}:\n"""'


def _first_line(text: str) -> str:
    return re.split(r"\n|(?<=\.)\s", text.strip())[0]


def _row(prompt: str, answer: str) -> tuple[Rows, Rows]:
    given = np.frombuffer(prompt.encode(), np.uint8)
    text = np.frombuffer(answer.encode() + bytes([END]), np.uint8)
    ids = np.concatenate([given, text])[:CONTEXT].astype(np.int64)
    labels = ids.copy()
    labels[: len(given)] = IGNORED
    left = CONTEXT - len(ids)
    return (
        np.pad(ids, (0, left), constant_values=END),
        np.pad(labels, (0, left), constant_values=IGNORED),
    )
