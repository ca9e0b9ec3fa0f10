"""Tests tell errors apart by keys, names, numbers and few words, not by sentences.

A sentence that a test repeats cannot be improved without changing the test, and often
ten of them. Searched are the patterns of ``match=``, what an assertion looks for in a
text, and the columns of ``parametrize`` and of loops that either of them uses.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = sorted(file.name for file in TESTS.iterdir() if any(file.rglob("test_*.py")))

MOST_WORDS = 4
"""Ordinary words in a row. Three are too few for "not a safetensors file", which tells
a damaged file from a missing one; with five, whole sentences would be allowed."""

TEXTS = {
    "unit/monitoring/test_comparison.py": "rows of a table",
    "unit/monitoring/test_model_card.py": "sentences of a model card",
    "unit/monitoring/test_privacy_words.py": "what a guarantee means in words",
    "unit/monitoring/test_progress.py": "lines of the terminal",
    "unit/monitoring/test_report.py": "sentences of the report",
    "unit/monitoring/test_tuning_page.py": "sentences of a page",
}
"""Files that test texts on purpose; what they expect of errors is searched, too."""

WORD = r"[(^]*[A-Z]?[a-z]+(?:['-][a-z]+)*[.,;!?)$]*"
"""An ordinary word, which a name in quotes, of_a_key, with.dots or a place: is not."""

QUOTE = r"""(?:(?<!")"(?!")|(?<=[\s(=\[fr])')"""
LONG = re.compile(rf"{QUOTE}[^\"\n]*?(?:{WORD}\s+){{{MOST_WORDS}}}{WORD}")
JOINT = re.compile(r'" *\n +[fr]*"')


def most_words(text: str) -> int:
    """How many ordinary words a text or pattern has in a row, at most."""
    row = most = 0
    for word in re.sub(r"\\(?=[ .-])", "", text).split():
        row = row + 1 if re.fullmatch(WORD, word) else 0
        most = max(most, row)
    return most


def literal(node: ast.AST) -> str:
    """What of a text is in the code; values are braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(literal(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return literal(left) + literal(right)
        case ast.Call(func=ast.Attribute(attr="escape"), args=[argument]):
            return literal(argument)
    return "{}"


def expected(tree: ast.AST, *, texts: bool) -> Iterator[ast.expr]:
    """What ``match=`` is given, and what assertions look for with ``in``."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="match", value=value):
                yield value
            case ast.Assert(test=test) if texts:
                for part in ast.walk(test):
                    match part:
                        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn(), *_]):
                            yield left


def cases(function: ast.AST, names: set[str]) -> Iterator[ast.expr]:
    """What these names stand for in the rows of ``parametrize`` and of loops."""
    for call in getattr(function, "decorator_list", ()):
        match call:
            case ast.Call(
                func=ast.Attribute(attr="parametrize"), args=[columns, rows, *_]
            ):
                titles = map(literal, getattr(columns, "elts", [columns]))
                single = isinstance(columns, ast.Constant)
                yield from _column([*titles], rows, names, single=single)
    for loop in ast.walk(function):
        if isinstance(loop, (ast.For, ast.comprehension)):
            targets = getattr(loop.target, "elts", [loop.target])
            titles = (getattr(each, "id", "") for each in targets)
            single = isinstance(loop.target, ast.Name)
            yield from _column([*titles], loop.iter, names, single=single)


def _column(
    titles: list[str], rows: ast.expr, names: set[str], *, single: bool
) -> Iterator[ast.expr]:
    for row in getattr(rows, "elts", ()):
        values = [row] if single else getattr(row, "args", getattr(row, "elts", ()))
        for title, value in zip(titles, values, strict=False):
            if title in names:
                yield value


def sought(tree: ast.Module, *, texts: bool) -> Iterator[ast.expr]:
    """Everything that tests expect to read, in fragments only if ``texts``."""
    for node in tree.body:
        found = [*expected(node, texts=texts)]
        names = {part.id for part in found if isinstance(part, ast.Name)}
        yield from found
        if names:
            yield from cases(node, names)


def blocks(code: str) -> Iterator[tuple[int, str]]:
    """First line and code of each function with a long text: to parse all takes 6 s."""
    line = 1
    for block in code.split("\n\n\n"):
        if LONG.search(JOINT.sub("", block)):
            yield line, block
        line += block.count("\n") + 3


def parsed(code: str) -> Iterator[tuple[int, ast.Module]]:
    """The same as trees; a module with such a gap inside a text is one block."""
    try:
        yield from [(line, ast.parse(block)) for line, block in blocks(code)]
    except SyntaxError:
        yield 1, ast.parse(code)


def long_texts(code: str, *, texts: bool = True) -> list[str]:
    """Line and text of what repeats too much of a sentence."""
    return [
        f"line {first + node.lineno - 1}: {literal(node)}"
        for first, tree in parsed(code)
        for node in sought(tree, texts=texts)
        if most_words(literal(node)) > MOST_WORDS
    ]


def found_in(files: Iterable[Path]) -> dict[str, list[str]]:
    named = {file.relative_to(TESTS).as_posix(): file for file in files}
    found = {
        name: long_texts(file.read_text("utf-8"), texts=name not in TEXTS)
        for name, file in sorted(named.items())
    }
    return {name: texts for name, texts in found.items() if texts}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_test_repeats_a_sentence(folder: str):
    """Keep the key, the name or the number, and the words that differ."""
    assert found_in((TESTS / folder).rglob("test_*.py")) == {}


REPEATS = {
    "pattern": 'raises(ValueError, match="the sum holds no values at all")',
    "template": 'raises(ValueError, match=f"{x}: the sum holds no values at all")',
    "escaped": 'raises(ValueError, match=re.escape("the sum holds no values ") + x)',
    "fragment": 'assert "the sum holds no values" in str(caught.value)',
    "absence": 'assert "the sum holds no values" not in text',
    "one of several": 'assert x and any("the sum holds no values" in t for t in told)',
    "quotes": """assert 'the sum holds no values in "x"' in text""",
    "two lines": 'assert ("the sum holds "\n        "no values" in text)',
}


def test_repeated_sentences_are_found():
    """With their lines, wherever an assertion has them."""
    for name, line in REPEATS.items():
        (told,) = long_texts(f"import re\n\n\ndef test():\n    {line}\n")
        assert re.match(r"line [56]: .*the sum holds no values", told), name
