"""Flower's package, as the doctor sees it."""

import re
from importlib import metadata

import pytest

from deploy.doctor.checks import check_flower


@pytest.mark.parametrize(
    ("version", "status", "numbers"),
    [
        ("1.41.0", "ok", ["1.41.0"]),
        ("1.41", "ok", ["1.41"]),
        ("1.42.3", "ok", ["1.42.3"]),
        ("1.43.0", "problem", ["1.43.0", "1.41", "1.43"]),
        ("1.410.0", "problem", ["1.410.0", "1.41", "1.43"]),
        ("1.40.2", "problem", ["1.40.2", "1.41", "1.43"]),
        ("2.41.0", "problem", ["2.41.0", "1.41", "1.43"]),
    ],
)
def test_minor_version_is_in_the_range(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    status: str,
    numbers: list[str],
):
    """A number that begins alike is another one."""
    needs = ["numpy>=2", 'flwr[simulation]<1.43,>=1.41; extra == "flower"']
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    monkeypatch.setattr(metadata, "version", lambda _: version)
    found = check_flower()
    assert found.status == status
    assert sorted(re.findall(r"[\d.]+", found.found)) == sorted(numbers)
    assert "crossfed[flower]" in found.advice or status == "ok"
