"""A privacy ledger that is deleted or put back: noticed, refused and recovered.

What a site has answered is proved by the anchors that the aggregator keeps, and by
what the site remembers itself. Each test takes some of that away.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import agents
from support.agents import RUN_ID, Consortium, consortium
from support.small_jobs import small_job
from support.without_report import simulate

from clients.models.model_pool import ModelPool
from deploy.cli import commands as cli
from deploy.site_host import run_status
from deploy.site_host.agent import SiteAgent
from federation.errors import CheckpointMismatch
from federation.events import SiteAnswered
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.messages import (
    LedgerAnchor,
    RoundTask,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from monitoring.runs.run_result import RunResult
from privacy.dp.errors import LedgerBehind, LedgerMismatch
from privacy.dp.ledger.ledger_files import HEAD_NAME, LEDGER_NAME, read_file
from privacy.membership.introduction import SiteAnchor
from privacy.secagg.agreement.identity import Label

NAME = SiteId("site-0")
DP = {"unit": "record", "target_epsilon": 8.0, "clip_norm": 1.0, "delta": 1e-3}


def private_job(rounds: int = 4, **privacy: Any) -> JobSpec:
    """Two sites, with a round and an evaluation charged each time."""
    return small_job(
        num_sites=2,
        rounds=rounds,
        training={"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        evaluation={"every": 1},
        privacy={"differential_privacy": DP} | privacy,
    )


def secret_job() -> JobSpec:
    """The same, summed in secret, which keeps a memory of rounds."""
    secure = {"enabled": True, "two_sites_waiver": True, "clip_norm": 10.0}
    return private_job(secure_aggregation=secure)


def ends_after(rounds: int) -> Callable[[], bool]:
    asked = iter([False] * rounds)
    return lambda: next(asked, True)


def begun(run: Path, job: JobSpec, rounds: int = 2) -> RunResult:
    """A run that was stopped after so many rounds."""
    found = simulate(job, folder=run, stop_requested=ends_after(rounds))
    assert found.status == "stopped"
    return found


def anchor(folder: Path) -> LedgerAnchor:
    """How many charges a ledger holds that is sound."""
    charges = read_file(folder / LEDGER_NAME).charges
    trains = sum(charge.purpose == "train" for charge in charges)
    return LedgerAnchor(train=trains, evaluate=len(charges) - trains)


def spent(seen: list[object], site: str) -> list[float]:
    """Epsilon that a site has answered with, in order."""
    answers = [e for e in seen if isinstance(e, SiteAnswered) and e.site == site]
    return [answer.spent.epsilon for answer in answers if answer.spent]


def lose_ledger(site: Path) -> None:
    for name in (LEDGER_NAME, HEAD_NAME):
        (site / name).unlink()


LOSSES: dict[str, Callable[[Path], None]] = {
    "deleted": lose_ledger,
    "deleted with all the site keeps": shutil.rmtree,
}


@pytest.mark.parametrize("make", [private_job, secret_job])
@pytest.mark.parametrize("loss", LOSSES)
def test_resumed_run_does_not_begin_at_epsilon_zero(
    tmp_path: Path, loss: str, make: Callable[[], JobSpec]
):
    """The checkpoint holds anchors: nobody answers before the ledger is recovered."""
    run, job = tmp_path / "run", make()
    begun(run, job)
    site = run / "sites" / NAME
    before = anchor(site)
    LOSSES[loss](site)
    seen: list[object] = []
    with pytest.raises(LedgerBehind, match="crossfed ledger recover"):
        simulate(job, folder=run, resume=True, listeners=[seen.append])
    assert not spent(seen, NAME)
    assert not (site / LEDGER_NAME).exists() or not (site / LEDGER_NAME).stat().st_size
    assert cli.main(["ledger", "recover", str(run)]) == 0
    assert before.is_within(anchor(site))
    result = simulate(job, folder=run, resume=True, listeners=[seen.append])
    assert result.rounds_completed > 2
    other = spent(seen, "site-1")
    assert spent(seen, NAME)[0] >= other[0]


def test_ledger_that_is_put_back_is_refused(tmp_path: Path):
    """Ledger and head are one whole, older pair: only the anchor shows it."""
    run, job = tmp_path / "run", private_job()
    begun(run, job, rounds=1)
    backup = shutil.copytree(run / "sites" / NAME, tmp_path / "backup")
    simulate(job, folder=run, resume=True, stop_requested=ends_after(1))
    shutil.rmtree(run / "sites" / NAME)
    shutil.copytree(backup, run / "sites" / NAME)
    with pytest.raises(LedgerBehind, match="holds 1 charges of training"):
        simulate(job, folder=run, resume=True)
    # What is there is left alone, and only what is missing is charged.
    assert anchor(run / "sites" / NAME) == anchor(backup)
    assert cli.main(["ledger", "recover", str(run)]) == 0
    recovered = read_file(run / "sites" / NAME / LEDGER_NAME).charges
    assert [c.round_index for c in recovered if c.purpose == "train"] == [1, 0]
    assert simulate(job, folder=run, resume=True).rounds_completed == 4


@pytest.mark.parametrize("loss", ["put back", "deleted"])
def test_reader_names_a_ledger_that_resume_would_refuse(
    tmp_path: Path, loss: str, capsys: pytest.CaptureFixture[str]
):
    """The run's record knows how many charges the site has made."""
    run = tmp_path / "run"
    begun(run, private_job(), rounds=1)
    backup = shutil.copytree(run / "sites" / NAME, tmp_path / "backup")
    simulate(private_job(), folder=run, resume=True, stop_requested=ends_after(1))
    assert cli.main(["ledger", str(run)]) == 0
    assert capsys.readouterr().out.count("charges     the run's record") == 2
    shutil.rmtree(run / "sites" / NAME)
    if loss == "put back":
        shutil.copytree(backup, run / "sites" / NAME)
    assert cli.main(["ledger", str(run)]) == 1
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("DAMAGED")
    assert ("holds 1 charges" if loss == "put back" else "No such file") in first
    assert "sites/site-1/ledger.jsonl: sound" in second
    # Elsewhere nothing tells a copy from the newest one, and the output admits it.
    assert cli.main(["ledger", str(backup)]) == 0
    assert "nothing here knows" in capsys.readouterr().out


@pytest.mark.parametrize("make", [private_job, secret_job])
def test_an_edited_job_is_refused_by_its_keys(
    tmp_path: Path, make: Callable[[], JobSpec]
):
    """The ledger only knows that another job opens it."""
    run, job = tmp_path / "run", make()
    begun(run, job, rounds=1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    dp = replace(job.privacy.differential_privacy, target_epsilon=7.5)
    optimizer = replace(job.training.optimizer, lr=0.25)
    edited = replace(
        job,
        training=replace(job.training, optimizer=optimizer),
        privacy=replace(job.privacy, differential_privacy=dp),
    )
    keys = r"target_epsilon: 7\.5 here, 8\.0 there.*lr: 0\.25 here, 0\.5 there"
    with pytest.raises(CheckpointMismatch, match=keys):
        simulate(edited, folder=run, resume=True)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before
    (run / "job.toml").unlink()
    with pytest.raises(LedgerMismatch, match="job_digest"):
        simulate(edited, folder=run, resume=True)
    assert simulate(job, folder=run, resume=True).status == "completed"


def test_whole_run_is_charged_once(tmp_path: Path):
    """A recovery that finds nothing missing charges nothing."""
    run, job = tmp_path / "run", private_job()
    begun(run, job)
    before = (run / "sites" / NAME / LEDGER_NAME).read_bytes()
    assert cli.main(["ledger", "recover", str(run)]) == 0
    assert (run / "sites" / NAME / LEDGER_NAME).read_bytes() == before


# Deployed sites.


@pytest.fixture(scope="module")
def members() -> Consortium:
    return consortium("site-0", "site-1")


class Deployed:
    """One site's agent, and an aggregator that keeps its anchor."""

    def __init__(self, folder: Path, members: Consortium, job: JobSpec) -> None:
        self.folder = folder / NAME
        self._where, self._members, self.job = folder, members, job
        self.anchor = LedgerAnchor()
        self.round_index = 0
        self.agent = self._start()

    def _start(self) -> SiteAgent:
        return agents.agent(self._where, NAME, self._members)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / RUN_ID

    @property
    def ledger(self) -> Path:
        return self.run / "sites" / NAME

    def restart(self) -> None:
        """Stop the agent's process and start it again."""
        self.agent.close()
        self.agent = self._start()

    def propose(self, anchor: LedgerAnchor | None = None, of: str = NAME) -> str:
        """Propose the run, as a coordinator does that starts; why it is refused."""
        known = () if anchor is None else (SiteAnchor(site=of, anchor=anchor),)
        made = agents.proposal(self.job, nonce=os.urandom(16).hex(), anchors=known)
        return agents.propose(self.agent, self._members, made).refused

    def ask(self, **changes: Any) -> SiteUpdate | SiteFailure:
        """Ask for the next round."""
        self.round_index += 1
        pool = ModelPool(self.job)
        weights_d, integers_m = pool.initial_weights()
        task = RoundTask(
            run_id=RUN_ID,
            round_index=self.round_index,
            site=NAME,
            kind=TaskKind.TRAIN,
            layout_digest=pool.layout.digest,
            weights_d=weights_d,
            integers_m=integers_m,
            evaluate=True,
            evaluate_after=False,
            anchor=self.anchor,
        )
        answer = self.agent.answer(replace(task, **changes))
        if isinstance(answer, SiteUpdate):
            assert answer.spent is not None
            self.anchor = self.anchor.joined(answer.spent.anchor)
        assert isinstance(answer, SiteUpdate | SiteFailure)
        return answer

    def recover(self) -> int:
        """Run the command as the operator does, with the agent stopped."""
        self.agent.close()
        config = str(self.folder / "site.toml")
        return cli.main(["ledger", "recover", RUN_ID, "--config", config])


@pytest.fixture
def site(tmp_path: Path, members: Consortium) -> Deployed:
    """A site that has answered two rounds."""
    made = Deployed(tmp_path, members, private_job())
    (made.folder / "identity.pem").unlink(missing_ok=True)
    members.sites[NAME].save(made.folder / "identity.pem")
    assert made.propose() == ""
    for _ in range(2):
        assert isinstance(made.ask(), SiteUpdate)
    assert made.anchor == LedgerAnchor(train=2, evaluate=2)
    return made


def is_behind(answer: object) -> bool:
    return isinstance(answer, SiteFailure) and "ledger recover" in answer.message


def test_deployed_site_remembers_a_deleted_ledger(site: Deployed):
    """Its own memory shows that, whatever the aggregator says."""
    site.agent.close()
    shutil.rmtree(site.ledger)
    site.restart()
    assert "holds 0 charges of training" in site.propose()
    assert site.recover() == 0
    assert anchor(site.ledger) == site.anchor
    site.restart()
    assert site.propose() == ""
    answer = site.ask()
    assert isinstance(answer, SiteUpdate)
    assert answer.spent is not None
    assert answer.spent.anchor == LedgerAnchor(train=3, evaluate=3)


def test_reader_asks_the_memory_of_a_deployed_site(
    site: Deployed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Which is in another folder; what was restored with it, it cannot know."""
    site.agent.close()
    backup = shutil.copytree(site.ledger, tmp_path / "backup")
    site.restart()
    assert isinstance(site.ask(), SiteUpdate)
    site.agent.close()
    arguments = ["ledger", RUN_ID, "--config", str(site.folder / "site.toml")]
    assert cli.main(arguments) == 0
    assert "charges     the site's memory" in capsys.readouterr().out
    shutil.rmtree(site.ledger)
    shutil.copytree(backup, site.ledger)
    assert cli.main(arguments) == 1
    assert "holds 2 charges of training" in capsys.readouterr().out


def test_status_shows_all_charges_that_are_known_and_the_refusal(
    site: Deployed, tmp_path: Path
):
    """Also after the run's folder was restored, and the run completed without it."""
    site.agent.close()
    backup = shutil.copytree(site.run, tmp_path / "backup")
    config = site.agent.config
    (before,) = run_status.status(config).runs
    site.restart()
    assert isinstance(site.ask(), SiteUpdate)
    site.agent.close()
    (after,) = run_status.status(config).runs
    shutil.rmtree(site.run)
    shutil.copytree(backup, site.run)
    site.restart()
    refused = site.propose()
    assert "ledger recover" in refused
    site.agent._tell_ended(RUN_ID, "completed")
    (shown,) = run_status.status(config).runs
    assert shown.answered == before.answered == 2
    assert shown.epsilon >= after.epsilon > before.epsilon
    text = "\n".join(run_status.lines(run_status.status(config), 0.0))
    assert "ledger recover" in text.partition("without this site")[2]
    assert site.recover() == 0
    site.restart()
    assert site.propose() == ""
    assert not run_status.status(config).refused


def test_status_shows_why_a_round_has_failed_here(site: Deployed):
    """For as long as no later one has an answer."""
    known, site.anchor = site.anchor, LedgerAnchor(train=9, evaluate=9)
    assert is_behind(site.ask())
    (shown,) = run_status.status(site.agent.config).runs
    assert shown.failure.startswith("round 3: ")
    assert "ledger recover" in shown.failure
    site.anchor = known
    assert isinstance(site.ask(), SiteUpdate)
    assert not run_status.status(site.agent.config).runs[0].failure


def test_deleted_folder_of_a_run_is_recovered(site: Deployed):
    """With its proposal, which the coordinator brings again."""
    site.agent.close()
    shutil.rmtree(site.run)
    site.restart()
    assert "ledger recover" in site.propose()
    assert site.recover() == 0
    assert anchor(site.ledger) == site.anchor
    site.restart()
    assert site.propose() == ""


@pytest.mark.parametrize("proposed", [True, False])
def test_aggregators_anchor_finds_a_site_that_was_put_back(
    site: Deployed, tmp_path: Path, *, proposed: bool
):
    """Ledger, head and memory are from one backup; a restart needs no proposal."""
    site.agent.close()
    backup = shutil.copytree(site.folder, tmp_path / "backup")
    site.restart()
    assert isinstance(site.ask(), SiteUpdate)
    site.agent.close()
    shutil.rmtree(site.folder)
    shutil.copytree(backup, site.folder)
    site.restart()
    if proposed:
        assert site.propose() == ""
    assert is_behind(site.ask())
    assert anchor(site.ledger) == LedgerAnchor(train=2, evaluate=2)
    # The site has kept the aggregator's number, so that it can be recovered.
    site.restart()
    assert site.recover() == 0
    assert anchor(site.ledger) == site.anchor == LedgerAnchor(train=3, evaluate=3)


def test_everything_gone_is_found_by_the_aggregator(site: Deployed):
    """Without ledger and memory the site knows nothing, and learns it from the task."""
    site.agent.close()
    shutil.rmtree(site.ledger)
    shutil.rmtree(site.folder / "memory")
    site.restart()
    assert site.propose() == ""
    assert is_behind(site.ask())
    site.restart()
    assert "holds 0 charges" in site.propose()
    assert site.recover() == 0
    site.restart()
    assert site.propose() == ""
    assert isinstance(site.ask(), SiteUpdate)


def test_proposal_with_the_anchor_finds_it_before_any_task(site: Deployed):
    """And what it says is kept: another proposal may know less."""
    ahead = LedgerAnchor(train=3, evaluate=2)
    assert "holds 2 charges of training" in site.propose(ahead)
    site.restart()
    assert "crossfed ledger recover" in site.propose()
    assert site.recover() == 0
    assert anchor(site.ledger) == ahead
    site.restart()
    assert site.propose(ahead) == ""


def test_anchor_of_another_site_decides_nothing(site: Deployed):
    """One proposal goes to all sites."""
    ahead = LedgerAnchor(train=30, evaluate=30)
    assert site.propose(ahead, of="site-1") == ""
    assert isinstance(site.ask(), SiteUpdate)


def test_lying_aggregator_only_denies(site: Deployed):
    """Too high an anchor stops the site or charges it more; never less."""
    before = anchor(site.ledger)
    assert is_behind(site.ask(anchor=LedgerAnchor(train=10**9, evaluate=2)))
    assert anchor(site.ledger) == before
    assert site.recover() == 1
    assert anchor(site.ledger) == before


def test_anchor_a_little_too_high_charges_more(site: Deployed):
    """It is charged as if those rounds had been answered."""
    assert is_behind(site.ask(anchor=LedgerAnchor(train=3, evaluate=2)))
    assert site.recover() == 0
    assert anchor(site.ledger) == LedgerAnchor(train=3, evaluate=2)


def test_ledger_ahead_of_its_anchor_is_normal(site: Deployed):
    """Charged, and killed before its answer arrived."""
    low = LedgerAnchor(train=1, evaluate=1)
    assert isinstance(site.ask(anchor=low), SiteUpdate)
    site.restart()
    assert isinstance(site.ask(anchor=low), SiteUpdate)


def test_head_is_signed_by_the_site(site: Deployed, members: Consortium):
    """A ledger that was computed afresh with a head of its own is not believed."""
    site.agent.close()
    head = json.loads((site.ledger / HEAD_NAME).read_bytes())
    assert len(bytes.fromhex(head.pop("signature"))) == 64
    unsigned = json.dumps(head, separators=(",", ":"), sort_keys=True) + "\n"
    (site.ledger / HEAD_NAME).write_text(unsigned)
    site.restart()
    assert "signature of this site's" in site.propose()
    other = members.sites["site-1"].sign(Label.LEDGER, unsigned.strip().encode())
    forged = {**head, "signature": other.hex()}
    text = json.dumps(forged, separators=(",", ":"), sort_keys=True) + "\n"
    (site.ledger / HEAD_NAME).write_text(text)
    assert "signed by this site's" in site.propose()
    code = cli.main(["ledger", RUN_ID, "--config", str(site.folder / "site.toml")])
    assert code == 1
    # Set aside, counted and charged again, with a head that the site has signed.
    assert site.recover() == 0
    assert anchor(site.ledger) == site.anchor
    assert (site.ledger / "damaged-1" / LEDGER_NAME).exists()
    site.restart()
    assert site.propose() == ""


def test_ledger_of_a_site_is_found(site: Deployed, capsys: pytest.CaptureFixture[str]):
    """By the run's folder at the site, and by its id beside the configuration."""
    site.agent.close()
    config = str(site.folder / "site.toml")
    for arguments in ([str(site.run)], [RUN_ID, "--config", config]):
        assert cli.main(["ledger", *arguments]) == 0
        assert "2 rounds, 2 charges" in capsys.readouterr().out
