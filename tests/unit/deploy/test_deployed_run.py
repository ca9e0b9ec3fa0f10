"""What keeps a deployed run from beginning, before a site is asked."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.agents import consortium
from support.enrolments import Federation
from support.small_jobs import small_job

from deploy.aggregator_host import run_queue
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.aggregator_host.handshake import SignedHandshake
from deploy.aggregator_host.parties import Parties, check, check_job
from deploy.cli import commands as cli
from federation.clock import SystemClock
from federation.errors import JobError, RunConflict, SiteError
from federation.event_log import EventWriter
from federation.events import PrivacyPlanned, RunStarted, SiteAnswered
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.messages import LedgerAnchor
from federation.protocols import RunState
from monitoring.runs.run_folder import RunFolder
from privacy.membership import introduction, key_files as keys, roster_file
from privacy.secagg.agreement import identity


def test_aggregator_without_sites_says_how_one_is_invited(tmp_path: Path):
    """What it has is no damaged roster but a draft."""
    made = keys.new(
        "aggregator", random_bytes=os.urandom, out=tmp_path / "aggregator.pem"
    )
    roster = tmp_path / "roster.toml"
    roster_file.trust(roster, site=None, organisation="Office", key=made.public_key)
    expected = f"aggregator invite SITE --config {tmp_path}/aggregator.toml"
    with pytest.raises(JobError, match=f"no site is enrolled yet: .*{expected}"):
        Parties.load(tmp_path)
    roster.write_text("serial = 1")
    with pytest.raises(JobError, match=r"roster\.toml: .*restore it from a backup"):
        Parties.load(tmp_path)


def test_code_of_a_user_cannot_end_the_coordinator(tmp_path: Path):
    """Flower would take it for one that is done, and another would be started."""
    run = RunFolder(tmp_path)
    run.write_job(small_job(model={"factory": "support.users_module:leaves"}))
    parties = consortium("site-0").parties
    with pytest.raises(JobError, match=r"SystemExit\(0\)"):
        DeployedRun(run, parties, clock=SystemClock())


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Four sites that are enrolled."""
    made = Federation(folder=tmp_path)
    for number in range(4):
        made.site(f"site-{number}")
    return made


def three_sites() -> JobSpec:
    """A job of three of them, and of any two if need be."""
    return small_job(num_sites=3, schedule={"minimum_sites": 2})


def four_in_secret() -> JobSpec:
    """Any three of four, under secure aggregation."""
    secure = {"enabled": True, "threshold": 3, "max_examples": 100}
    return small_job(num_sites=4, privacy={"secure_aggregation": secure})


def begun(federation: Federation, job: JobSpec) -> RunFolder:
    """A run whose coordinator was killed in the first round."""
    run = RunFolder(federation.folder / "runs" / job.name / "20260102-030405-abcdef")
    run_queue.submit(job, run, at=0.0)
    Parties.of_run(federation.aggregator, run)
    with EventWriter(run.events) as note:
        note(
            RunStarted(
                at=0.0,
                run_id=run.path.name,
                job_name=job.name,
                rounds=job.rounds,
                first_round=1,
                sites=tuple(site.name for site in job.sites),
                parameters=15,
                engine="deployed",
                task="classification",
            )
        )
    Parties.of_run(federation.aggregator, run)
    return run


def test_revoked_site_is_refused_before_a_run_begins(federation: Federation):
    """Immediately, and by its name; who is enrolled again is no longer revoked."""
    federation.revoke("site-2")
    expected = r"sites: revoked: site-2; .*aggregator invite site-2"
    with pytest.raises(JobError, match=expected):
        check(three_sites(), Parties.load(federation.aggregator))
    run = RunFolder(federation.folder)
    run.write_job(three_sites())
    parties = Parties.of_run(federation.aggregator, run)
    with pytest.raises(JobError, match=expected):
        DeployedRun(run, parties, clock=SystemClock())
    federation.enroll(federation.invite("site-2"), "new-folder")
    check(three_sites(), Parties.load(federation.aggregator))
    check(three_sites(), Parties.of_run(federation.aggregator, run))


def test_revoked_site_is_done_without_once_a_run_has_begun(federation: Federation):
    """As long as enough are left, and whoever has its name by now."""
    job = three_sites()
    run = begun(federation, job)
    federation.revoke("site-2")
    federation.enroll(federation.invite("site-2"), "new-folder")
    parties = Parties.of_run(federation.aggregator, run)
    assert parties.revoked == {"site-2"}
    check(job, parties, resumed=True)
    federation.revoke("site-1")
    parties = Parties.of_run(federation.aggregator, run)
    expected = r"revoked: site-1, site-2; .*needs 2 of its 3 sites to continue"
    with pytest.raises(JobError, match=expected):
        DeployedRun(run, parties, clock=SystemClock())


def test_run_resumes_with_its_own_roster_and_aggregator_only(federation: Federation):
    """Its sites agreed with those who are pinned there, and with nobody else."""
    run = begun(federation, three_sites())
    kept = run.path / "roster.toml"
    text = kept.read_text()
    kept.unlink()
    with pytest.raises(JobError, match=r"roster\.toml is missing.*restore"):
        Parties.of_run(federation.aggregator, run)
    own = Parties.load(federation.aggregator).roster.aggregator_key.hex()
    other = identity.generate(os.urandom).public.key.hex()
    kept.write_text(text.replace(own, other))
    with pytest.raises(JobError, match=r"pins another aggregator.*that began it"):
        Parties.of_run(federation.aggregator, run)


def test_secure_run_cannot_do_without_a_revoked_site(federation: Federation):
    """A new coordinator makes new keys, and with all sites."""
    job = four_in_secret()
    run = begun(federation, job)
    federation.revoke("site-2")
    parties = Parties.of_run(federation.aggregator, run)
    with pytest.raises(JobError, match="needs 4 of its 4 sites to continue"):
        check(job, parties, resumed=True)


class Asked(Exception):
    """The roll would now be called."""


@pytest.mark.parametrize(
    ("job", "resumed", "spares"),
    [
        (three_sites(), False, False),
        (three_sites(), True, True),
        (four_in_secret(), True, False),
    ],
)
def test_refusals_are_absences_once_a_run_in_the_clear_has_begun(
    federation: Federation, job: JobSpec, *, resumed: bool, spares: bool
):
    """Before that they end it, and under secure aggregation later, too."""
    run = RunFolder(federation.folder)
    run.write_job(job)
    if resumed:
        run = begun(federation, job)
    found = []

    def connect(
        handshake: SignedHandshake,
        sites: Sequence[SiteId],
        *,
        required: int,
        quorum: int,
    ) -> Any:
        found.append((len(sites), required, quorum, handshake.spares))
        raise Asked

    parties = Parties.of_run(federation.aggregator, run)
    with pytest.raises(Asked):
        DeployedRun(run, parties, clock=SystemClock()).run(connect)
    num_sites, quorum = len(job.sites), job.minimum_sites
    assert found == [(num_sites, quorum, quorum, spares)]


@pytest.mark.parametrize("is_promised", [False, True])
def test_private_run_that_goes_on_knows_anchors_and_promises(
    federation: Federation, *, is_promised: bool
):
    """Anchors of answers and of checkpoints; without promises of all it needs all."""
    private = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-4}
    job = small_job(
        num_sites=3,
        schedule={"minimum_sites": 2},
        aggregation={"weights": "uniform"},
        privacy={"differential_privacy": private},
    )
    names = tuple(site.name for site in job.sites)
    run = RunFolder(federation.folder / "runs" / job.name / "one")
    run_queue.submit(job, run, at=0.0)
    Parties.of_run(federation.aggregator, run)
    script = event_samples.Script(sites=names, stop_after=2, epsilon_cap=8.0)
    with EventWriter(run.events) as note:
        for event in event_samples.run(script):
            if isinstance(event, SiteAnswered) and event.spent is not None:
                anchor = LedgerAnchor(train=event.round_index)
                spent = replace(event.spent, anchor=anchor)
                note(replace(event, spent=spent))
            elif isinstance(event, RunStarted):
                note(replace(event, engine="deployed"))
            elif is_promised or not isinstance(event, PrivacyPlanned):
                note(event)
    parties, found = Parties.of_run(federation.aggregator, run), []
    deployed = DeployedRun(run, parties, clock=SystemClock())
    weights_d, integers_m = deployed._federation.pool.initial_weights()
    state = RunState(
        round_index=1,
        rounds_completed=1,
        lost_in_a_row=0,
        weights_d=weights_d,
        integers_m=integers_m,
        optimizer={},
        anchors={SiteId("site-1"): LedgerAnchor(train=5)},
    )
    deployed._assembly.checkpoints().save(state)

    def connect(
        handshake: SignedHandshake,
        _sites: Sequence[SiteId],
        *,
        required: int,
        quorum: int,
    ) -> Any:
        proposal = introduction.open_proposal(handshake.question, parties.roster)
        charges = [proposal.anchor_of(SiteId(name)).train for name in names]
        found.append((charges, required, quorum, handshake.spares))
        with pytest.raises(RunConflict), run.locked():
            pass  # Another coordinator would work on it, too.
        raise Asked

    with pytest.raises(Asked):
        deployed.run(connect)
    assert found == [([2, 5, 2], 2 if is_promised else 3, 2, is_promised)]
    # Of sites that are absent now, too.
    kept = [promise.site for promise in deployed._promises()]
    assert kept == [*names] * is_promised


def test_run_behind_relays_begins_with_enough_sites_alone(federation: Federation):
    """A relay that answers may have none of its sites."""
    federation.enroll(federation.invite("east", role="relay"))
    relays = [{"name": "east", "sites": ["site-0"]}]
    run = RunFolder(federation.folder)
    run.write_job(small_job(num_sites=3, relays=relays, schedule={"minimum_sites": 2}))
    parties = Parties.of_run(federation.aggregator, run)
    with pytest.raises(SiteError, match="the run cannot start"):
        DeployedRun(run, parties, clock=SystemClock()).run(lambda *_, **__: None)  # type: ignore[arg-type,return-value]


def test_roster_of_another_aggregator_is_refused(federation: Federation):
    """Sites would not believe a word of this one."""
    own = federation.aggregator / "aggregator.pem"
    own.unlink()
    keys.new("aggregator", random_bytes=os.urandom, out=own)
    with pytest.raises(JobError, match="pins another aggregator than"):
        Parties.load(federation.aggregator)


def test_command_refuses_a_job_of_a_revoked_site(
    federation: Federation, capsys: pytest.CaptureFixture[str]
):
    """Before anything is handed over; a run that has begun is taken up."""
    home, job = federation.aggregator, three_sites()
    config = home / "aggregator.toml"
    config.write_text('listen = "127.0.0.1:8443"\nhosts = ["127.0.0.1"]\n')
    path = federation.folder / "job.toml"
    RunFolder(federation.folder).write_job(job)
    federation.revoke("site-2")
    command = ["run", str(path), "--aggregator", str(config), "--detach"]
    assert cli.main(command) == 2
    assert "sites: revoked: site-2; invite again" in capsys.readouterr().err
    assert not list(home.glob("runs/*/*"))


@pytest.mark.parametrize(
    "simulation",
    [
        {"faults": [{"site": "site-0", "kind": "crash"}]},
        {"live_metrics": ["tensorboard"]},
    ],
)
def test_what_only_a_simulation_does_is_refused(simulation: dict[str, Any]):
    """Or a run would go without it, and nobody would know."""
    (key,) = simulation
    with pytest.raises(JobError, match="for simulations only") as caught:
        check_job(small_job(simulation=simulation))
    assert caught.value.key == f"simulation.{key}"
