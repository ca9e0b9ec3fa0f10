"""What a job is said to cost before it runs."""

import pytest
from support.small_jobs import small_job

from deploy import job_check


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
