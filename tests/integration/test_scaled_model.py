"""One site of a simulation lies about its weight: the model stays what it was."""

import dataclasses
from pathlib import Path

import pytest
from support.lying_sites import Lies, weight_of
from support.without_report import simulate

from clients.privacy.level_seal import seal_of
from clients.privacy.ring_seal import Protection, RingSeal
from federation import events
from federation.errors import QuorumNotMet
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
LIAR = "gcp-europe-west4"


def five_sites(rounds: int) -> JobSpec:
    """``jobs/secure.toml`` without faults, with a weight of 1 for every site."""
    job = job_file.load(JOBS / "secure.toml")
    table = dataclasses.replace(job.privacy.secure_aggregation, clip_norm=8.0)
    return dataclasses.replace(
        job,
        rounds=rounds,
        aggregation=dataclasses.replace(job.aggregation, weights="uniform"),
        privacy=dataclasses.replace(job.privacy, secure_aggregation=table),
        simulation=dataclasses.replace(job.simulation, faults=()),
    )


def among_them(monkeypatch: pytest.MonkeyPatch, lies: Lies) -> None:
    """Make one site of every simulation a liar."""

    def make(job: JobSpec, name: SiteId, protection: Protection) -> RingSeal:
        seal = seal_of(job, name, protection)
        return lies.told_with(seal) if name == LIAR else seal

    monkeypatch.setattr("deploy.wiring.rehearsal.seal_of", make)


def test_weight_of_one_site_does_not_scale_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The round of the lie is lost, says why, and the others continue to a model."""
    among_them(monkeypatch, Lies(header=weight_of(-3.999999)))
    seen: list[events.Event] = []
    simulate(five_sites(3), folder=tmp_path / "run", listeners=[seen.append])
    ends = [e for e in seen if isinstance(e, events.RoundFinished)]
    assert [end.status for end in ends] == ["completed", "lost", "completed"]
    assert all(end.update_norm is None or end.update_norm <= 8.01 for end in ends)
    warnings = [e.message for e in seen if isinstance(e, events.Warned)]
    (told,) = [text for text in warnings if "the weights of 5 sites sum to" in text]
    assert "a site lied" in told


def test_run_that_a_liar_ends_says_so(monkeypatch: pytest.MonkeyPatch):
    """Whoever reads the error alone learns that no site's machine is to blame."""
    among_them(monkeypatch, Lies(header=weight_of(-3.999999), round_index=1))
    job = five_sites(2)
    schedule = dataclasses.replace(job.schedule, max_lost_rounds=1)
    with pytest.raises(QuorumNotMet, match=r"the sum: the weights .* a site lied"):
        simulate(dataclasses.replace(job, schedule=schedule))
