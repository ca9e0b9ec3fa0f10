"""The commands that pages give for benchmarks are commands that the scripts take.

A figure is worth what its command is. Options are read from the text of the scripts,
because importing all of them takes many seconds.
"""

import argparse
import ast
import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "benchmarks" / "README.md"
PAGES = [README, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
IS_SCRIPT = 'if __name__ == "__main__":'
SCRIPTS = {
    path.stem: path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if IS_SCRIPT in path.read_text(encoding="utf-8")
}
WITHOUT_OPTIONS = {"turn_cases"}  # It takes patterns of names.

SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?<![\w/.])(?:benchmarks/)?(\w+)\.py(?!\w)(.*)", re.DOTALL)
# Options of `crossfed plan`, of which the README writes too.
FOREIGN = {"--like"}
TYPES = {"int": int, "float": float, "Path": Path}


class _Parser(argparse.ArgumentParser):
    """Raises where a script would end."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser_of(text: str) -> argparse.ArgumentParser:
    """The options that a script's calls of ``add_argument`` name."""
    parser = _Parser(allow_abbrev=False)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "add_argument":
            settings = dict(_settings(node.keywords))
            parser.add_argument(*map(ast.literal_eval, node.args), **settings)
    return parser


def _settings(keywords: list[ast.keyword]) -> Iterator[tuple[str, object]]:
    """What decides whether a command parses; other names are not followed."""
    for keyword in keywords:
        value = keyword.value
        if keyword.arg == "type" and isinstance(value, ast.Name):
            yield "type", TYPES[value.id]
        if keyword.arg in {"nargs", "action"}:
            yield keyword.arg, ast.literal_eval(value)
        if keyword.arg == "choices":
            with contextlib.suppress(ValueError):  # Not written out.
                yield "choices", ast.literal_eval(value)


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Script and words of each command, and of options alone below a heading."""
    for section in re.split(r"^(?=##+ )", text, flags=re.MULTILINE):
        prose = FENCED.sub("", section)
        blocks = "\n".join(FENCED.findall(section))
        heading = prose.partition("\n")[0]
        named = [m[1] for m in COMMAND.finditer(heading) if m[1] in SCRIPTS]
        for code in (*SPAN.findall(prose), *blocks.splitlines()):
            found = COMMAND.search(code)
            if found and found[1] in SCRIPTS:
                yield found[1], shlex.split(found[2])
            elif named and code.startswith("--") and code not in FOREIGN:
                yield named[0], shlex.split(code)


def test_commands_of_pages_are_what_scripts_take():
    parsers = {name: parser_of(path.read_text()) for name, path in SCRIPTS.items()}
    wrong, seen = [], 0
    for page in PAGES:
        for name, words in commands(page.read_text(encoding="utf-8")):
            seen += 1
            if name in WITHOUT_OPTIONS:
                continue
            try:
                parsers[name].parse_args(words)
            except ValueError as error:
                place = page.relative_to(ROOT)
                wrong.append(f"{place}: {name}.py {shlex.join(words)}: {error}")
    assert wrong == []
    assert seen > 60


@pytest.mark.parametrize(
    "words", ["--seeds two", "--seed 1", "--kind large", "--sites"], ids=str.split
)
def test_a_command_that_a_script_refuses_is_found(words: str):
    """A value of another type, an option that is gone, a choice, and no value."""
    script = """
add.add_argument("--seeds", type=int, default=SEEDS)
add.add_argument("--sites", type=int, nargs="+", choices=[*SITES])
add.add_argument("--kind", choices=("small", "tiny"))
"""
    parser = parser_of(script)
    parser.parse_args(shlex.split("--seeds 2 --sites 1 2 --kind tiny"))
    section = f"## Title: `audit.py`\n\nWith `{words}`.\n"
    assert list(commands(section)) == [("audit", []), ("audit", shlex.split(words))]
    with pytest.raises(ValueError, match="--"):
        parser.parse_args(shlex.split(words))


def test_each_script_has_figures_in_the_readme():
    """Or nobody knows what its figures were, and by which command."""
    named = {name for name, _ in commands(README.read_text(encoding="utf-8"))}
    assert SCRIPTS.keys() - named - WITHOUT_OPTIONS == set()
