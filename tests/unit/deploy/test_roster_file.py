"""Rosters as a person works with them."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.secagg_parties import entropy

from privacy.membership import roster_file
from privacy.secagg.agreement import identity, roster
from privacy.secagg.errors import RosterRefused

KEYS = [identity.generate(entropy(f"key {at}")).public.key.hex() for at in range(4)]


def trust(path: Path, site: str | None, key: str = KEYS[0], **fields: Any):
    usual = {"organisation": "Hospital A"}
    return roster_file.trust(path, site=site, key=key, **(usual | fields))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A roster with an aggregator and one site, at serial 2."""
    path = tmp_path / "roster.toml"
    trust(path, None, KEYS[0])
    trust(path, "left", KEYS[1])
    return path


@pytest.mark.parametrize("order", [(None, "left"), ("left", None)])
def test_roster_grows_from_nothing(tmp_path: Path, order: tuple[str | None, ...]):
    """In any order; a draft is not a roster yet."""
    path = tmp_path / "roster.toml"
    first = trust(path, order[0], KEYS[0])
    assert (first.serial, first.digest, len(first.missing)) == (1, None, 1)
    with pytest.raises(RosterRefused):
        roster.load(path)
    second = trust(path, order[1], KEYS[1])
    found = roster.load(path)
    assert (second.serial, second.missing) == (2, ())
    assert (found.serial, found.digest.hex()) == (2, second.digest)


def test_pinning_adds_and_raises_the_serial(whole: Path):
    """Others stay as they are, in the order of names; the mode is kept."""
    whole.chmod(0o600)
    facts = trust(whole, "a-site", KEYS[2], organisation='Büro "A"')
    found = roster.load(whole)
    assert [entry.site for entry in found.sites] == ["a-site", "left"]
    assert found.sites[0].organisation == 'Büro "A"'
    assert (found.serial, facts.sites, facts.changed) == (3, 2, True)
    assert whole.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in whole.parent.iterdir()] == ["roster.toml"]


def test_pinning_the_same_again_changes_nothing(whole: Path):
    """No new serial, so no site has to fetch it; spaces and case do not matter."""
    before = whole.read_bytes()
    assert trust(whole, "left", KEYS[1].upper()).changed is False
    assert trust(whole, None, f" {KEYS[0]}\n").changed is False
    assert whole.read_bytes() == before


@pytest.mark.parametrize("site", [None, "left"])
def test_pinned_key_is_replaced_only_on_request(whole: Path, site: str | None):
    """By another key or another organisation."""
    before, pinned = whole.read_bytes(), KEYS[0 if site is None else 1]
    with pytest.raises(RosterRefused, match=r"roster\.toml already pins.*--replace"):
        trust(whole, site, KEYS[3])
    with pytest.raises(RosterRefused, match=r"'Hospital A'.*--replace"):
        trust(whole, site, pinned, organisation="Thieves")
    assert whole.read_bytes() == before
    assert trust(whole, site, KEYS[3], replace=True).serial == 3
    found = roster.load(whole)
    keys_now = [found.aggregator_key, found.sites[0].public_key]
    assert keys_now[0 if site is None else 1].hex() == KEYS[3]


def test_impossible_entries_leave_the_roster_alone(whole: Path):
    """A key of somebody else, a bad name, a bad organisation, no key."""
    before = whole.read_bytes()
    for arguments in (
        {"site": "right", "key": KEYS[1]},
        {"site": "Right", "key": KEYS[2]},
        {"site": "right", "key": KEYS[2], "organisation": "a\nb"},
    ):
        with pytest.raises(RosterRefused, match="nothing was written"):
            trust(whole, **arguments)
    for text in ("", "12", "zz" * 32, KEYS[0] + "00"):
        with pytest.raises(RosterRefused, match="not a public key"):
            trust(whole, "right", text)
    assert whole.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"serial = = 1", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"serial = 1\ncolour = 2", "unknown key 'colour'"),
        (b"", "roster.serial must be"),
        (b"serial = 1\nsites = []", "1 to 1024 sites"),
        (b"#" * ((1 << 20) + 1), "is larger"),
    ],
)
def test_bad_roster_is_not_written_over(tmp_path: Path, content: bytes, words: str):
    """The error names the file."""
    path = tmp_path / "roster.toml"
    path.write_bytes(content)
    with pytest.raises(RosterRefused, match=words) as caught:
        trust(path, "left")
    assert "roster.toml" in str(caught.value)
    assert path.read_bytes() == content


def test_unreachable_rosters_are_named(tmp_path: Path):
    """A folder in its place, or no folder to write in."""
    with pytest.raises(RosterRefused, match="Is a directory"):
        trust(tmp_path, "left")
    with pytest.raises(RosterRefused, match=r"cannot write.*none.*writable"):
        trust(tmp_path / "none" / "roster.toml", "left")


def test_a_draft_is_plain_toml(tmp_path: Path):
    """Without the stand-ins that its check needs."""
    path = tmp_path / "roster.toml"
    trust(path, None, KEYS[0])
    expected = {"organisation": "Hospital A", "public_key": KEYS[0]}
    assert tomllib.loads(path.read_text()) == {"serial": 1, "aggregator": expected}


@pytest.mark.parametrize("text", [b'serial = "', b"serial = 1\n", b"\xff"])
def test_a_damaged_roster_is_named_with_what_to_do(tmp_path: Path, text: bytes):
    path = tmp_path / "roster.toml"
    path.write_bytes(text)
    with pytest.raises(RosterRefused) as caught:
        roster.load(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith("or restore it from a backup")
