"""The contract that a simulation draws up from its job."""

from typing import Any

import pytest
from support.secure_runs import secure_job

from deploy.wiring import parts as wiring
from deploy.wiring.rehearsal import Rehearsal, rehearse
from federation.errors import JobError
from federation.ids import RunId
from privacy.secagg.agreement.policy import check_against_policy
from privacy.secagg.agreement.terms import NO_PRIVACY


def _rehearsal(**secure: Any) -> Rehearsal:
    job = secure_job(**secure)
    return rehearse(wiring.build_federation(job), RunId("run-1"), None)


def test_contract_says_what_the_job_says():
    """Its ring included, which both halves derive from it."""
    contract = _rehearsal(
        ring_bits=24, clip_norm=3.0, element_bound=0.5, clip_elements=True
    ).contract
    ring = contract.ring()
    assert (
        ring.bits,
        ring.num_sites,
        ring.clip_norm,
        ring.element_bound,
        ring.clip_elements,
    ) == (24, 5, 3.0, 0.5, True)
    assert (ring.scale, ring.amplitude) == (contract.scale, contract.amplitude)
    assert contract.differential_privacy == NO_PRIVACY


def test_contract_is_at_the_limit_of_its_sites():
    """Whoever runs a simulation is every operator."""
    rehearsal = _rehearsal(element_bound=0.5)
    layout = rehearsal.federation.pool.layout
    check_against_policy(rehearsal.contract, rehearsal._policy(layout))


def test_bound_without_room_is_the_jobs_mistake():
    """With the table, and no traceback."""
    with pytest.raises(JobError, match="too small for float32") as caught:
        _rehearsal(element_bound=1e-30)
    assert caught.value.key == "privacy.secure_aggregation"
