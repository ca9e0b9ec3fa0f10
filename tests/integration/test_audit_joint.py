"""Audits of joint noise: from the sums that a secure run opens, and nothing else.

Canaries, sampling, rounding and noise are drawn from fixed seeds by one worker, so
every figure is that of these very draws.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from clients.privacy.site_plans import PrivateSites
from clients.training.local_federation import Federation
from clients.training.private_steps import sensitivity_of_sum
from deploy.audit.audit import audit, plan_sites
from deploy.audit.jobs import with_more_records, with_room_in_sums
from deploy.audit.runs import Attack
from deploy.cli import audit_verb
from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.protocols import Clock
from monitoring.audit_findings import AuditFindings, document, lines
from monitoring.pages.audit_page import render

pytestmark = pytest.mark.slow

RECORDS = 448  # On the grid of numbers of records, so that a batch can be all
CANARIES = 30_000


def joint_job(
    noise: float | None,
    *,
    num_sites: int = 3,
    secure: dict[str, Any] | None = None,
    private: dict[str, Any] | None = None,
    **tables: Any,
) -> JobSpec:
    """One sum over all records of all sites, unless told otherwise."""
    usual: dict[str, Any] = {
        "data": {
            "source": "support.small_jobs:blobs",
            "options": {"num_train": RECORDS * num_sites},
            "partition": {"kind": "iid"},
        },
        "training": {
            "local_steps": 1,
            "batch_size": RECORDS,
            "optimizer": {"name": "sgd", "lr": 0.5},
        },
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": 0},
        "simulation": {"workers": 1},
        "privacy": {
            "secure_aggregation": {"enabled": True, **(secure or {})},
            "differential_privacy": {
                "unit": "joint",
                "target_epsilon": 60.0,
                "delta": 1e-5,
                "clipping": "ghost",
                **({} if noise is None else {"noise_multiplier": noise}),
                **(private or {}),
            },
        },
    }
    return small_job(num_sites=num_sites, **(usual | tables))


def audited(
    job: JobSpec,
    *,
    canaries: int,
    sites: tuple[str, ...] = (),
    noise_times: float = 1.0,
    seed: int = 0,
) -> AuditFindings:
    """Audit shares of the noise that are not what sites tell their ledgers."""
    random_bytes = np.random.default_rng(seed).bytes

    def plan(federation: Federation, clock: Clock) -> PrivateSites | None:
        found = plan_sites(federation, clock)
        assert found is not None
        return with_shares(found, federation.job, noise_times, random_bytes)

    attack = Attack(canaries=canaries, sites=sites, random_bytes=random_bytes)
    return audit(job, attack, plan_sites=plan)


def with_shares(
    found: PrivateSites,
    job: JobSpec,
    times: float,
    random_bytes: Callable[[int], bytes],
) -> PrivateSites:
    assert found.in_sum is not None
    share = replace(
        found.in_sum.share, multiplier=times * found.in_sum.share.multiplier
    )
    ring = share.ring_spec(
        bits=job.privacy.secure_aggregation.ring_bits,
        num_sites=len(job.sites),
        clip_norm=job.update_clip_norm,
    )
    found.in_sum = replace(found.in_sum, share=share, ring=ring)
    plans = {}
    for name, plan in found.plans.items():
        assert plan.training is not None
        training = replace(plan.training, random_bytes=random_bytes)
        plans[name] = replace(plan, training=training)
    found.plans = plans
    return found


def test_audit_separates_the_pipeline_from_one_with_half_the_shares():
    """Through data, model, clipping, ring, noise, masks and the opened sum.

    With other seeds the right pipeline would be called broken with a probability
    below 1e-20, far less than the confidence allows. The wrong one would pass with a
    probability of 1 %; canaries at all three sites would take three times as long.
    """
    job = joint_job(2.0)
    kept, broken = (
        audited(job, canaries=CANARIES, sites=("site-1",), noise_times=times)
        for times in (1.0, 0.5)
    )
    assert kept.broken == []
    assert broken.broken != []
    assert [s.promise for s in broken.sites] == [s.promise for s in kept.sites]


@pytest.mark.parametrize(
    ("num_sites", "threshold", "colluding"),
    [(2, None, 1), (4, None, 2), (5, 4, 1)],
)
def test_sum_holds_as_little_noise_as_the_accounting_counts_on(
    num_sites: int, threshold: int | None, colluding: int
):
    """Not that of colluders, nor of those who may drop out: ``t - n_C`` shares.

    Five standard errors: one false alarm in a million draws.
    """
    job = joint_job(
        2.0,
        num_sites=num_sites,
        secure={"two_sites_waiver": True}
        | ({} if threshold is None else {"threshold": threshold}),
        private={"colluding_sites": colluding},
    )
    found = audited(job, canaries=2 * CANARIES // 3, sites=("site-1",))
    (site,) = found.sites
    honest = (threshold or num_sites) - colluding
    assert (found.num_sites, found.noise_shares) == (num_sites, honest)
    one = sensitivity_of_sum(job) / num_sites  # What a record moves of the mean.
    inside, out = site.scores_m[site.is_in_m], site.scores_m[~site.is_in_m]
    error = 1 / math.sqrt(2 * len(out))
    assert out.std() / one == pytest.approx(2.0, rel=5 * error)
    error = 2.0 * math.sqrt(2 / len(out))
    # Clipping takes a margin for the rounding of so many records' sum.
    assert 0.9 - 5 * error < (inside.mean() - out.mean()) / one < 1 + 5 * error


def test_every_site_has_canaries_of_its_own():
    """Almost without noise every coin of every site is read off the same sums."""
    found = audited(joint_job(1.0), canaries=1000, noise_times=0.02)
    assert [site.site for site in found.sites] == ["site-0", "site-1", "site-2"]
    assert all(site.guesses.correct == site.guesses.guesses for site in found.sites)
    one, other, _ = (site.is_in_m for site in found.sites)
    assert 400 < (one != other).sum() < 600


@pytest.mark.parametrize(
    "tables",
    [
        {"training": {"batch_size": 100, "accumulate": 2}},
        {"secure": {"threshold": 3, "ring_bits": 24}},
        {"private": {"colluding_sites": 2, "clipping": "hooks", "clip_norm": 0.1}},
    ],
    ids=["sampling", "dropouts-24-bits", "colluders"],
)
def test_right_pipelines_stay_below_their_epsilon(tables: dict[str, Any]):
    """Over several rounds, with what changes noise, ring or sampling."""
    job = joint_job(4.0, num_sites=4, **({"rounds": 3} | _whole(tables)))
    # Those of four sites are too many for a grid of 24 bits, and so are 1,000.
    is_coarse = job.privacy.secure_aggregation.ring_bits == 24
    sites, canaries = (("site-3",), 900) if is_coarse else ((), 1000)
    found = audited(job, canaries=canaries, sites=sites, seed=1)
    assert found.broken == []
    assert all(site.canaries.auc > 0.53 for site in found.sites)
    assert all(0 < site.promise.epsilon < 3 for site in found.sites)


def _whole(tables: dict[str, Any]) -> dict[str, Any]:
    if "training" not in tables:
        return tables
    optimizer = {"optimizer": {"name": "sgd", "lr": 0.5}, "local_steps": 1}
    return tables | {"training": optimizer | tables["training"]}


def test_job_of_joint_noise_is_audited_from_its_sums(tmp_path: Path):
    """Two rounds of jobs/joint.toml; nobody sees a site's own model."""
    path = Path(__file__).parents[2] / "jobs" / "joint.toml"
    job = job_file.load(path, ["rounds=2"])
    # Of 300 canaries, one draw in ten could not have told that noise is missing.
    attack = Attack(canaries=600, random_bytes=np.random.default_rng(1).bytes)
    found = audit(job, attack)
    assert found.broken == []
    assert (found.num_sites, found.noise_shares) == (4, 3)
    assert all(0.5 < site.canaries.auc < 1 for site in found.sites)
    told = document(found)
    assert (told["num_sites"], told["noise_shares"]) == (4, 3)
    assert told["sites"][0]["membership_local_model"] is None
    assert "noise of 3 sites in each sum" in "\n".join(lines(found))
    page = render(found)
    assert "noise of 3 of 4 sites" in page
    assert "last model" not in page
    audit_verb.leave(found, tmp_path / "new")
    assert audit_verb.show(found, tmp_path / "new", as_json=True) == 0
    # So few guesses could not contradict any epsilon; the curve of rates could.
    assert all(site.largest_bound < site.promise.epsilon for site in found.sites)
    assert told["inconclusive"] == []


@pytest.mark.parametrize("num_canaries", [100, 5000, 60_000])
def test_canaries_leave_what_a_record_changes_as_it_is(num_canaries: int):
    """Though a site's batches are larger, and its updates longer."""
    job = joint_job(1.0, training={"local_steps": 1, "batch_size": 60})
    new, _ = with_more_records(job, RECORDS, num_canaries)
    assert new.training.batch_size * new.training.accumulate > 60
    assert sensitivity_of_sum(new) == pytest.approx(sensitivity_of_sum(job), rel=1e-12)
    wide = with_room_in_sums(job, num_canaries)
    assert sensitivity_of_sum(wide) == sensitivity_of_sum(job)
    all_in = sensitivity_of_sum(job) * math.sqrt(num_canaries)
    assert wide.update_clip_norm**2 == pytest.approx(
        job.update_clip_norm**2 + all_in**2
    )


def test_canaries_too_many_for_the_ring_are_refused():
    """Rounding of their values would add to what a record may change."""
    job = joint_job(1.0, secure={"ring_bits": 24})
    with pytest.raises(JobError, match=r"20000 canaries at each .* rounding 120041"):
        audit(job, Attack(canaries=20_000))


def test_canaries_too_many_for_one_sum_are_refused():
    """Codes are exact up to a number, and every site has its own."""
    with pytest.raises(JobError, match="400000 canaries at each of 3 sites"):
        audit(joint_job(1.0), Attack(canaries=400_000))


@pytest.mark.parametrize(
    ("num_sites", "target", "message"),
    [
        (16, 8.0, r"16 right ones.*epsilon of 1\.23 .*job's 8 cannot be"),
        (64, 2.0, r"64 right ones.*epsilon of 2\.85 .*the job's target"),
        (4, 1.0, r"4 right ones.*epsilon of 0\.00 .*job's 1 cannot be"),
    ],
)
def test_whole_sites_are_refused_with_what_an_audit_could_show(
    num_sites: int, target: float, message: str
):
    """There are as many guesses as sites."""
    job = joint_job(None, num_sites=num_sites)
    private = replace(
        job.privacy.differential_privacy, unit="site", target_epsilon=target, delta=None
    )
    job = replace(job, privacy=replace(job.privacy, differential_privacy=private))
    with pytest.raises(JobError, match=message) as caught:
        audit(job, Attack())
    assert caught.value.key == "privacy.differential_privacy.unit"
