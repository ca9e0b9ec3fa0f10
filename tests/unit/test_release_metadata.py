"""Addresses of a release, and its description."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the oldest and newest sets build nothing")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import release_metadata  # noqa: E402

README = (
    "![A page](docs/a.png)\n\nSee [it](docs/it.md#part) and [them](https://a.b/c).\n"
)


def test_a_release_without_an_address_has_no_dead_links():
    assert release_metadata.addresses("", "1.2.0") == {}
    assert (
        release_metadata.description(README, "", "1.2.0")
        == "See it and [them](https://a.b/c).\n"
    )


def test_links_lead_to_the_files_of_the_release():
    url = release_metadata.repository("https://example.org/we/it/")
    assert release_metadata.description(README, url, "1.2.0") == (
        "![A page](https://example.org/we/it/raw/v1.2.0/docs/a.png)\n\n"
        "See [it](https://example.org/we/it/blob/v1.2.0/docs/it.md#part) "
        "and [them](https://a.b/c).\n"
    )
    assert release_metadata.addresses(url, "1.2.0")["Homepage"] == url


@pytest.mark.parametrize(
    "given",
    [
        "example.org/a/b",
        "http://example.org/a",
        "https://example.org",
        "https:///a/b",
        "https://example.org/a b",
        "https://example.org/a?b",
        "x",
    ],
)
def test_what_names_no_repository_is_refused(given: str):
    with pytest.raises(ValueError, match="expected https://HOST/OWNER/NAME"):
        release_metadata.repository(given)


def test_a_token_is_neither_published_nor_shown():
    """``git remote get-url`` may have one."""
    with pytest.raises(ValueError, match="expected https://HOST/OWNER/NAME") as caught:
        release_metadata.repository("https://we:secret@example.org/we/it")
    assert "secret" not in str(caught.value)
