"""Idioms that read as translated stay out of the documentation.

Checked is prose alone: code blocks, inline code and the targets of links are left out.
A line break counts as a space.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCOPE = ["*.md", "docs/*.md", "docs/*/*.md", "benchmarks/*.md", "deploy/**/*.md"]
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
}
"""What is not written, as a regular expression, and what is written instead."""

FENCE = re.compile(r"^```.*?^```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`]+`|\]\([^)]*\)")


def pages() -> list[Path]:
    """Every page in scope, once."""
    return sorted({page for glob in SCOPE for page in ROOT.glob(glob)})


def prose(text: str) -> str:
    """The text with code blanked, its line breaks where they were."""
    for code in (FENCE, CODE):
        text = code.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
    return text


def idioms(text: str) -> list[str]:
    """Line, idiom and plain wording of what must not stay as it is."""
    text = prose(text)
    return [
        f"line {text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}: write {plain}"
        for idiom, plain in PLAIN.items()
        for found in re.finditer(
            rf"\b(?:{idiom})\b".replace(" ", r"\s+"), text, re.IGNORECASE
        )
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_are_in_plain_english(page: Path):
    assert idioms(page.read_text(encoding="utf-8")) == []


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
