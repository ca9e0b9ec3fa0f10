"""Idioms that read as translated stay out of pages, messages, docstrings and comments.

Only prose is checked: code blocks, inline code and the targets of links are omitted.
A line break counts as a space.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation import OURS

ROOT = Path(__file__).resolve().parents[2]

SCOPE = [
    "*.md",
    "docs/*.md",
    "docs/*/*.md",
    "benchmarks/*.md",
    "studies/*/*.md",
    "deploy/**/*.md",
]
"""Globs of the pages that are checked, those generated from the code among them."""

PLAIN = {
    # Who does what: name the actor.
    r"(?:is|are|was|were|be|been) (?:not |never )?told": "X reports ... / you see ...",
    r"(?:is|are|was|were|be) said (?:of|by|when)": "X says ...",
    r"there is said": "X says ...",
    r"nobody is told": "it is never reported",
    r"who (?:has |have |had )?answered": "participating sites",
    r"who (?:is|are|was|were) silent": "dropped sites",
    r"has the last word": "decides / is authoritative",
    r"no last word": "no error message",
    # The field's own terms.
    r"roll calls?": "handshake or registration",
    r"in the clear": "without secure aggregation / unencrypted / in plaintext",
    r"in secret(?! shar)": "with secure aggregation",
    r"under (?:the )?masks?": "masked",
    r"masks? (?:does |do )?(?:not )?comes? off": "can(not) be unmasked",
    r"(?:deals?|dealt|dealing) (?:\w+ ){0,4}out": "split",
    # Stiff or literal turns of phrase.
    r"(?:is|are|was|were) (?:not |no longer )?to be had": "is (un)available",
    r"out of reach": "unreachable",
    r"(?:held?|holds|holding) (?:[\w`-]+ ){0,4}against (?:each other|one another)": (
        "compare"
    ),
    r"hold against": "compare with / apply to",
    r"(?:goes?|went|going) on (?:at|with|without)": "continue / resume on / use",
    r"there and back": "a round trip",
    r"as if nothing had (?:been|happened)": "continue",
    r"(?:is|are|was|were) taken for": "is mistaken for / counts as",
    r"(?:is|are|was|were) (?:asked after|waited for)": "X requests / waits for",
    r"anew": "again",
    r"dearer|dearest": "more expensive",
    r"(?:is|are) (?:a matter|the business) of": "depends on",
    r"(?:is|are|was|were) not one of": "no ... / none of",
    r"to itself alone": "only to itself",
    r"counts? for nothing": "is ignored",
    r"(?:is|are) good for": "works for / is valid for",
    r"ha(?:s|ve) (?:its|their) turn": "runs next",
    r"spoils? nothing": "does no harm",
    r"(?:nothing )?comes? (?:of|to) nothing|nothing comes of": "has no effect",
    r"(?:does|do|gets|get) (?:by )?without (?:it|them|its|their)": "does not need",
    r"each (?:for|by) itself": "each separately",
    r"(?:is|are|was|were) begun": "started",
    r"are made to fit": "are adjusted",
    r"puts? (?:\w+ )?to the test": "tests",
    r"in the midst of": "during",
    r"nobody can tell": "cannot be detected",
    r"looks? after": "handles",
    r"in clear(?! text)": "unencrypted",
    r"(?:has|have) (?:[\w`]+ ){1,2}to (?:itself|themselves)": "has its own",
    r"busy otherwise": "otherwise busy",
    r"goes? with the run": "is deleted with the run",
    r"gone for good": "lost",
    r"is of another": "belongs to another",
    r"whom it holds against": "whom it protects against",
    r"when all is well": "normally",
    r"somebody (?:is )?in between": "a man-in-the-middle",
    r"kept nowhere": "is not stored",
    r"(?:is|are|was|were) (?:not )?spoken": "is (not) supported",
    r"mends?|mended": "fix",
    r"taken away": "removed",
    r"brings? (?:\w+ ){0,4}back": "restore",
    r"cannot be told": "cannot be detected",
    r"handed over": "submitted / sent",
    r"(?:gives?|gave) out": "returns",
    r"left alone": "is skipped / is not started",
    r"(?:tells?|speaks?) of": "reveals / is about",
    r"somebody": "someone",
    r"nobody(?:'s)? (?:here|reads|needs|looks|waits|answers|asks|any more)": (
        "it is not used / there is no answer"
    ),
    r"(?:may|need not|they|that) lie (?:in|at|there|beside|behind)": "is stored / is",
    r"without a word": "without notice",
    r"whoever": "anyone who / those who / the ... that",
    r"anybody(?:'s)?": "anyone",
    r"however often": "each time / even if often",
    r"(?:can|could|may) be had": "is available",
    r"asks? after": "ask for the state of",
    r"(?:(?:is|are|was|were|be|been|nor)|machines?|nodes?|pods?) taken back": (
        "is preempted / is undone"
    ),
    r"put back from": "restored from",
    r"of yours": "your",
    r"(?:gives?|given|giving|gave) (?:[\w`]+ ){0,3}again": "run / call again",
    r"(?:gives?|gave) (?:crossfed \w+|the command|this command)": "run",
    r"stands? (?:twice|there|beside|before|in the)": "is there twice / is in",
    r"(?:has|have|had) (?:not )?told": "has reported",
    r"in whatever (?!order)": "in any",
    r"(?:let|lets) (?:[\w`]+ ){1,3}in no more": "refuses from now on",
    # Several things at once are at the same time, which is plain enough.
    r"(?:(?:answer|begin|end|fail|leave|return|revoke|start|stop)(?:s|ed)?|replie[sd]|"
    r"refused?|shown|let in|begun|used|site|it|run) at once": "immediately",
}
"""What is not written, as a regular expression, and what is written instead."""


def _pattern(idiom: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{idiom})\b".replace(" ", r"\s+"), re.IGNORECASE)


ANY = re.compile(_pattern("|".join(PLAIN)).pattern)
"""Finds any of them in lower case, to pass over texts without one."""

JOINT = re.compile(r"""(?:\\n|["#\s]|(?<!\w)'|'(?!\w)|\b[fr]+(?=["']))+""")
"""What may be between two words of one string or comment of the code."""

PACKAGES = sorted({*OURS, "crossfed"})
"""The product's packages, with their templates and command-line help."""

FENCE = re.compile(r"^```.*?^```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`]+`|\]\([^)]*\)")
COMMENT = re.compile(r"(?<=#) .*(?:\n *# .*)*")


def pages() -> list[Path]:
    """Every page in scope, once."""
    return sorted({page for glob in SCOPE for page in ROOT.glob(glob)})


def prose(text: str) -> str:
    """The text with code blanked, its line breaks where they were."""
    for code in (FENCE, CODE):
        text = code.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
    return text


def idioms(text: str, first_line: int = 1) -> list[str]:
    """Line, idiom and plain wording of what must not stay as it is."""
    text = prose(text)
    if not ANY.search(text.lower()):
        return []
    return [
        f"line {text.count(chr(10), 0, found.start()) + first_line}: {found[0]!r}: "
        f"write {plain}"
        for idiom, plain in PLAIN.items()
        for found in _pattern(idiom).finditer(text)
    ]


def texts(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string and comment; values in f-strings are braces."""
    tree = ast.parse(code)
    inner = {
        id(part) for node in ast.walk(tree) for part in getattr(node, "values", ())
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(part, "value", None) for part in node.values]
            yield (
                node.lineno,
                "".join(part if isinstance(part, str) else "{}" for part in parts),
            )
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield node.lineno, str(node.value)
    for block in COMMENT.finditer(code):
        yield code.count("\n", 0, block.start()) + 1, re.sub(r"\n *#", "\n", block[0])


def found_in(package: Path) -> Iterator[str]:
    """File, line and idiom, over all files of a package."""
    for path in sorted(package.rglob("*")):
        if path.suffix not in {".py", ".toml", ".j2"}:
            continue
        text = path.read_text(encoding="utf-8")
        if not ANY.search(JOINT.sub(" ", text).lower()):
            continue  # To parse all of them takes seconds.
        parts = texts(text) if path.suffix == ".py" else [(1, text)]
        for line, part in parts:
            for found in idioms(part, line):
                yield f"{path.relative_to(ROOT)}, {found}"


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_docstrings_and_comments_are_in_plain_english(package: str):
    assert list(found_in(ROOT / package)) == []


def test_idioms_in_code_are_found():
    code = '''def f(x):
    """Does it anew."""
    # One that is not
    # to be had.
    raise ValueError(
        f"{x} has been "
        "taken away"
    )
'''
    found = [each for line, text in texts(code) for each in idioms(text, line)]
    assert sorted(found) == [
        "line 2: 'anew': write again",
        "line 3: 'is not\\n to be had': write is (un)available",
        "line 6: 'taken away': write removed",
    ]


def test_no_idiom_is_passed_over(tmp_path: Path):
    """A file is only parsed if an idiom may be in it, over whatever joint."""
    for code in (
        '"""Does it\n    anew."""',
        "# It is not\n# to be had.",
        'f("It has been " f"taken " r"away")',
        "'has been taken\\naway'",
        '"nobody\'s here"',
        "'''Somebody'''",
    ):
        (tmp_path / "code.py").write_text(code)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{__name__}.ROOT", tmp_path)
            assert len(list(found_in(tmp_path))) == 1, code


def test_pages_are_in_plain_english():
    found = {
        page.relative_to(ROOT).as_posix(): idioms(page.read_text(encoding="utf-8"))
        for page in pages()
    }
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_every_glob_finds_a_page():
    assert [glob for glob in SCOPE if not [*ROOT.glob(glob)]] == []


def test_an_idiom_is_found_over_a_line_break():
    found = idioms(
        "One line.\nThe service is not to be\nhad now, and `in the clear`.\n"
    )
    assert found == ["line 2: 'is not to be\\nhad': write is (un)available"]


def test_code_is_no_prose():
    page = "```sh\necho in the clear\n```\n<!-- roll call -->\n[x](roll%20call.md)\n"
    assert idioms(page) == []
