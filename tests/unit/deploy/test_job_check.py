"""What a job is said to cost before it runs."""

from typing import Any

import pytest
from support.small_jobs import small_job

from deploy.cli import job_check
from deploy.wiring import parts as wiring


@pytest.mark.parametrize(("bits", "up"), [(None, 400), (32, 400), (24, 300), (16, 200)])
def test_updates_are_as_large_as_their_words(bits: int | None, up: int) -> None:
    """Under secure aggregation a value takes as many bytes as a word of the ring."""
    privacy = {}
    if bits is not None:
        secure = {"enabled": True, "ring_bits": bits}
        privacy = {"privacy": {"secure_aggregation": secure}}
    job = small_job(num_sites=3, **privacy)
    assert job_check.bytes_up(job, 100) == up
    assert job_check.bytes_down(100) == 400


def checked(**secure: Any) -> str:
    """What is said of nine sites under secure aggregation, or in the clear."""
    rule = {"weights": "uniform"}
    if "groups" in secure:
        rule |= {"combine": "median", "byzantine_sites": 1}
    options = {"num_train": 150, "num_held_out": 30}
    job = small_job(
        num_sites=9,
        aggregation=rule,
        data={"source": "support.small_jobs:blobs", "options": options},
        privacy={"secure_aggregation": {"enabled": bool(secure), **secure}},
    )
    return " ".join(job_check.promises(wiring.build_federation(job)))


def test_check_says_what_bounds_a_bad_site() -> None:
    """The clip norm alone, or a rule over groups; nothing where updates are seen."""
    assert "by up to the clip norm, 10. For a robust" in checked(hybrid=True)
    expected = "median over 3 groups of 3 or more sites, which all sites draw together"
    assert f"{expected}: withstands 1 bad site, wherever" in checked(groups=3)
    assert not checked()
