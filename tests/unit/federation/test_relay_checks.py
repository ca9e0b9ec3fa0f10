"""What a job must not ask of relays."""

from typing import Any

import pytest
from support.small_jobs import small_job

from federation.errors import JobError
from federation.job import job_digest
from federation.job.job_file import document

RELAYS = [{"name": f"cloud-{i}", "sites": [f"site-{i}"]} for i in range(2)]
ENOUGH = {"schedule": {"minimum_sites": 2}}


@pytest.mark.parametrize(
    ("tables", "key", "text"),
    [
        ({"relays": [{"name": "a", "sites": []}]}, "relays[0].sites", "has no sites"),
        (
            {"relays": [{"name": "a", "sites": ["site-9"]}]},
            "relays[0].sites",
            "there is no site 'site-9'",
        ),
        (
            {"relays": [*RELAYS, {"name": "b", "sites": ["site-1"]}]},
            "relays[2].sites",
            "already behind relay 'cloud-1'",
        ),
        (
            {"relays": [{"name": "site-0", "sites": ["site-1"]}]},
            "relays[0].name",
            "is called 'site-0'",
        ),
        ({"schedule": {}}, "schedule.minimum_sites", "a round needs 3"),
        (
            {
                "schedule": {},
                "privacy": {"secure_aggregation": {"enabled": True}},
            },
            "privacy.secure_aggregation.threshold",
            "a round needs 3",
        ),
        (
            {"simulation": {"relays": [{"relay": "nowhere"}]}},
            "simulation.relays[0].relay",
            "there is no relay 'nowhere'",
        ),
    ],
)
def test_refusals(tables: dict[str, Any], key: str, text: str):
    with pytest.raises(JobError, match=text) as caught:
        small_job(num_sites=3, **{"relays": RELAYS} | ENOUGH | tables)
    assert caught.value.key == key


def test_relays_decide_and_their_absence_changes_no_digest():
    """Sites that were given other relays hold another job; older jobs stay."""
    flat = small_job(num_sites=3, **ENOUGH)
    behind = small_job(num_sites=3, relays=RELAYS, **ENOUGH)
    assert "relays" in document(behind)
    assert "relays" not in job_digest.deciding(flat)
    assert job_digest.digest(flat) != job_digest.digest(behind)
