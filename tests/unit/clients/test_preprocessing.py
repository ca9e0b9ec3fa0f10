"""What sources say they take from the data, and which units of privacy permit it."""

import pytest

from clients import data
from clients.preprocessing import PREPROCESSINGS, declared_by, fault, preprocessing
from federation.errors import JobError


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "text_folder"])
def test_shipped_sources_may_be_used_under_every_unit(name: str):
    """None of them takes a statistic from records."""
    kind = declared_by(getattr(data, name), name=name)
    assert kind in {"none", "public"}
    for unit in ("none", "record", "joint", "site"):
        for is_dealt in (False, True):
            assert fault(kind, unit, is_dealt=is_dealt) is None


def test_who_may_know_what():
    """Every unit, with data of a site's own and with data that is dealt out."""
    permitted = {
        (unit, is_dealt): [
            kind
            for kind in ("", *PREPROCESSINGS)
            if fault(kind, unit, is_dealt=is_dealt) is None
        ]
        for unit in ("none", "record", "joint", "site")
        for is_dealt in (False, True)
    }
    every, constants = ["", *PREPROCESSINGS], ["none", "public"]
    assert permitted == {
        ("none", False): every,
        ("none", True): every,
        ("record", False): constants,
        ("record", True): constants,
        ("joint", False): constants,
        ("joint", True): constants,
        ("site", False): [*constants, "own"],
        ("site", True): constants,
    }


def test_a_function_declares_itself():
    """By a decorator or by an attribute; an unknown word is a mistake."""

    def source() -> None: ...

    assert declared_by(source, name="m:source") == ""
    assert declared_by(preprocessing("own")(source), name="m:source") == "own"
    source.preprocessing = "a mean"  # type: ignore[attr-defined]
    with pytest.raises(JobError, match=r"data.source: m:source declares .*'a mean'"):
        declared_by(source, name="m:source", key="data.source")
    with pytest.raises(ValueError, match="'mean'"):
        preprocessing("mean")
