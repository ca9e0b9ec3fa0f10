"""Flower's package, as the doctor sees it."""

from importlib import metadata

import pytest

from deploy.doctor.flower import check_flower, pinned_version


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [
        ("1.41.0", "ok", "1.41.0"),
        ("1.41", "ok", "1.41"),
        ("1.410.0", "problem", "1.410.0 is none of 1.41"),
        ("1.40.2", "problem", "1.40.2 is none of 1.41"),
    ],
)
def test_minor_version_is_the_pinned_one(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str, text: str
):
    """A number that begins alike is another one."""
    needs = ["numpy>=2", 'flwr[simulation]==1.41.*; extra == "flower"']
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    monkeypatch.setattr(metadata, "version", lambda _: version)
    found = check_flower()
    assert (found.status, found.found) == (status, text)
    assert "crossfed[flower]" in found.advice or status == "ok"


def test_flower_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    """It comes with an extra."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    found = check_flower()
    assert (found.status, found.found) == ("problem", "it is not installed")
    assert "pip install 'crossfed[flower]'" in found.advice


def test_version_is_pinned_to_a_minor_one():
    """Of what is installed here: the pattern must fit what is written there."""
    pinned = pinned_version()
    assert pinned is not None
    assert pinned.count(".") == 1
