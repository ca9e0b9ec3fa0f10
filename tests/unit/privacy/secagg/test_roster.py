"""The roster file: whose key is whose."""

import dataclasses
from pathlib import Path

import pytest
from support.secagg_parties import Parties, site_name

from federation.ids import SiteId
from privacy.secagg.agreement import roster as rosters
from privacy.secagg.errors import RosterRefused, StaleRoster, UnknownSite

ROSTER = Parties(3).roster


def test_file_round_trip(tmp_path: Path):
    """A written roster is the same roster, with the same digest."""
    path = tmp_path / "roster.toml"
    odd = dataclasses.replace(ROSTER, aggregator_organisation='Büro "A" \\ 東')
    rosters.save(odd, path)
    rosters.save(odd, path)
    assert rosters.load(path) == odd
    assert rosters.load(path).digest == odd.digest


def test_order_in_the_file_does_not_matter():
    """Sites are sorted by name."""
    head, *tables = rosters.dumps(ROSTER).split("[[sites]]")
    text = "[[sites]]".join([head, *reversed([t + "\n" for t in tables])])
    assert rosters.parse(text).digest == ROSTER.digest


def test_digest_depends_on_every_field():
    """Serial, keys, names and organisations are all pinned."""
    entry = ROSTER.sites[0]
    others = [
        dataclasses.replace(ROSTER, serial=4),
        dataclasses.replace(ROSTER, aggregator_organisation="x"),
        dataclasses.replace(ROSTER, aggregator_key=bytes(32)),
        dataclasses.replace(ROSTER, sites=ROSTER.sites[1:]),
        *(
            dataclasses.replace(
                ROSTER,
                sites=(dataclasses.replace(entry, **change), *ROSTER.sites[1:]),
            )
            for change in (
                {"site": SiteId("a")},
                {"organisation": "x"},
                {"public_key": b"\x01" * 32},
            )
        ),
    ]
    digests = {ROSTER.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1


def replace(old: str, new: str) -> str:
    text = rosters.dumps(ROSTER)
    assert old in text
    return text.replace(old, new, 1)


KEY = ROSTER.sites[0].public_key.hex()
AGGREGATOR = f'[aggregator]\norganisation = "a"\npublic_key = "{KEY}"\n'


@pytest.mark.parametrize(
    "text",
    [
        "serial = ",
        "",
        replace("serial = 3", "serial = 0"),
        replace("serial = 3", "serial = true"),
        replace("serial = 3", "serial = 3\nsreial = 3"),
        replace("[aggregator]", "[aggregator]\ncolour = 1"),
        replace('name = "site-01"', 'name = "Site 1"'),
        replace('name = "site-01"', 'name = "site-02"'),
        replace('name = "site-01"', "name = 1"),
        replace('organisation = "hospital 1"', 'organisation = ""'),
        replace('organisation = "hospital 1"', 'organisation = "a\\u202eb"'),
        replace('organisation = "hospital 1"', f'organisation = "{"x" * 201}"'),
        replace(KEY, KEY[:-1]),
        replace(KEY, KEY.upper()),
        replace(KEY, "zz" + KEY[2:]),
        replace(KEY, ROSTER.sites[1].public_key.hex()),
        replace(KEY, ROSTER.aggregator_key.hex()),
        f"serial = 1\nsites = []\n{AGGREGATOR}",
        f"serial = 1\nsites = [1]\n{AGGREGATOR}",
    ],
)
def test_bad_rosters_are_refused(text: str):
    """Unknown keys, wrong types, duplicates and unreadable text are errors."""
    with pytest.raises(RosterRefused):
        rosters.parse(text)


def test_unusable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Missing, not text, too long, or not writable."""
    path = tmp_path / "roster.toml"
    with pytest.raises(RosterRefused, match="No such file"):
        rosters.load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(RosterRefused, match="UTF-8"):
        rosters.load(path)
    monkeypatch.setattr(rosters, "MAX_ROSTER_BYTES", 0)
    with pytest.raises(RosterRefused, match="larger"):
        rosters.load(path)
    with pytest.raises(RosterRefused, match="cannot write"):
        rosters.save(ROSTER, tmp_path / "missing" / "roster.toml")


def test_sites_are_found_by_name():
    """A stranger is named in the error."""
    assert ROSTER.entry(site_name(2)) is ROSTER.sites[1]
    with pytest.raises(UnknownSite, match="'nobody'"):
        ROSTER.entry(SiteId("nobody"))


def test_older_roster_is_stale():
    """Serials never fall, and one serial has one content."""
    newer = dataclasses.replace(ROSTER, serial=4)
    other = dataclasses.replace(ROSTER, aggregator_organisation="x")
    ROSTER.check_successor(ROSTER)
    ROSTER.check_successor(newer)
    with pytest.raises(StaleRoster, match="already has roster 4"):
        newer.check_successor(ROSTER)
    with pytest.raises(StaleRoster, match="two rosters"):
        ROSTER.check_successor(other)


def test_keys_have_32_bytes():
    """Also in a roster that no file was read for."""
    with pytest.raises(RosterRefused, match="32 bytes, not 31"):
        dataclasses.replace(ROSTER, aggregator_key=bytes(31))
