"""A site whose disk is put back from a backup, between two coordinators of a run.

Everything that the site keeps is older than what it has answered: ledger, head,
memory, proposal. Only the aggregator can know, and it says so when it proposes the
run again, before anybody is charged.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import agents
from support.agents import RUN_ID, AgentGrid, Consortium, consortium
from support.small_jobs import small_job

from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.cli import commands as cli
from federation import events
from federation.clock import SystemClock
from federation.errors import SiteError
from federation.job.spec import JobSpec
from federation.messages import LedgerAnchor
from monitoring.runs.run_folder import RunFolder
from monitoring.runs.run_result import RunResult
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file

pytestmark = pytest.mark.slow

SITES = ("site-0", "site-1", "site-2")
RESTORED = SITES[0]
SECURE = {"enabled": True, "clip_norm": 10.0}


class Killed(BaseException):
    """Ends a coordinator as a signal would: nothing tidies up after it."""


def private_job(
    unit: str = "record", *, secure: bool = False, **tables: Any
) -> JobSpec:
    """Three sites, four rounds, each with an evaluation that is charged."""
    privacy: dict[str, Any] = {
        "differential_privacy": {
            "unit": unit,
            "target_epsilon": 8.0,
            "clip_norm": 1.0,
            "delta": 1e-3,
            "reserve_rounds": 4,
        }
    }
    if secure:
        privacy["secure_aggregation"] = SECURE
    return small_job(
        num_sites=len(SITES),
        rounds=4,
        training={"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        evaluation={"every": 1},
        privacy=privacy,
        **tables,
    )


@dataclass
class Place:
    """An aggregator and its sites; a coordinator of it may be killed."""

    folder: Path
    members: Consortium
    grid: AgentGrid
    seen: list[events.Event] = field(default_factory=list)

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / RUN_ID)

    def begin(self, job: JobSpec) -> None:
        self.run_folder.path.mkdir(parents=True)
        self.run_folder.write_job(job)

    def run(self, listen: Callable[[events.Event], None] = lambda _: None) -> RunResult:
        """Run a coordinator, as one that is started anew does."""
        coordinator = DeployedRun(
            self.run_folder,
            self.members.parties,
            clock=SystemClock(),
            listeners=[self.seen.append, listen],
            report=False,
        )
        return coordinator.run(self.grid.connect)

    def back_up(self) -> None:
        """Copy the whole folder of the site, while its agent runs."""
        shutil.copytree(self.folder / RESTORED, self.folder / "backup")

    def restore(self) -> None:
        """Put that copy in the place of the folder, and start the agent."""
        self.grid.agents[RESTORED].close()
        shutil.rmtree(self.folder / RESTORED)
        shutil.copytree(self.folder / "backup", self.folder / RESTORED)
        self.start()

    def start(self) -> None:
        self.grid.agents[RESTORED] = agents.agent(self.folder, RESTORED, self.members)

    def recover(self) -> None:
        """Do what the refusal says, with the agent stopped."""
        self.grid.agents[RESTORED].close()
        config = self.folder / RESTORED / "site.toml"
        assert cli.main(["ledger", "recover", RUN_ID, "--config", str(config)]) == 0
        self.start()

    def charges(self) -> dict[str, LedgerAnchor]:
        """How many charges each ledger holds."""
        found = {}
        for site in SITES:
            path = self.folder / site / "runs" / RUN_ID / "sites" / site / LEDGER_NAME
            purposes = [charge.purpose for charge in read_file(path).charges]
            found[site] = LedgerAnchor(
                train=purposes.count("train"), evaluate=purposes.count("evaluate")
            )
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    members = consortium(*SITES)
    found = {name: agents.agent(tmp_path, name, members) for name in SITES}
    for name in SITES:
        members.sites[name].save(tmp_path / name / "identity.pem")
    with AgentGrid(found).connected() as grid:
        yield Place(tmp_path, members, grid)


def ends_round(event: events.Event, index: int) -> bool:
    return isinstance(event, events.RoundFinished) and event.round_index == index


def last_answer(event: events.Event, index: int) -> bool:
    """Whether the site has answered in a round that is not saved yet."""
    return isinstance(event, events.SiteAnswered) and (
        event.site,
        event.round_index,
    ) == (RESTORED, index)


def evaluates_last(event: events.Event, index: int) -> bool:
    """Whether the final model was evaluated, which no checkpoint tells."""
    return isinstance(event, events.ModelEvaluated) and event.round_index == index


def killing(
    place: Place, copied: int, is_last: Callable[[events.Event], bool]
) -> Callable[[events.Event], None]:
    """Copy the site's folder after a round, and kill the coordinator later."""

    def listen(event: events.Event) -> None:
        if ends_round(event, copied):
            place.back_up()
        if is_last(event):
            raise Killed

    return listen


PLAIN, SECRET = private_job(), private_job(secure=True)
IN_SUM = private_job("joint", secure=True)
LONG = pytest.mark.long  # In the clear there is less to get wrong.
KILLS: list[Any] = [
    pytest.param(PLAIN, 1, last_answer, 2, id="a saved round and the killed one"),
    pytest.param(PLAIN, 2, last_answer, 3, id="the killed round alone", marks=LONG),
    pytest.param(SECRET, 2, last_answer, 3, id="the same, in secret"),
    pytest.param(IN_SUM, 2, last_answer, 3, id="the same, with noise in the sum"),
    pytest.param(
        PLAIN, 4, evaluates_last, 4, id="the last evaluation alone", marks=LONG
    ),
    pytest.param(SECRET, 4, evaluates_last, 4, id="the same evaluation, in secret"),
]


@pytest.mark.parametrize(("job", "copied", "is_last", "index"), KILLS)
def test_only_the_restored_site_refuses_and_nobody_is_charged(
    place: Place,
    job: JobSpec,
    copied: int,
    is_last: Callable[[events.Event, int], bool],
    index: int,
):
    """By name, when the run is proposed; after its recovery the run continues."""
    place.begin(job)
    with pytest.raises(Killed):
        place.run(killing(place, copied, lambda event: is_last(event, index)))
    place.grid.end()
    before = place.charges()
    place.restore()
    behind = place.charges()
    assert before[RESTORED] != behind[RESTORED]
    asked = len(place.grid.seen)
    expected = f"^site '{RESTORED}' does not take part: .*crossfed ledger recover"
    with pytest.raises(SiteError, match=expected):
        place.run()
    assert place.charges() == behind
    assert len(place.grid.seen) == asked
    place.recover()
    assert before[RESTORED].is_within(place.charges()[RESTORED])
    assert place.run().status == "completed"


def test_run_that_can_spare_the_restored_site_goes_on_without_it(place: Place):
    """The others lose no round to it, and it is named."""
    place.begin(private_job(schedule={"minimum_sites": 2}))
    with pytest.raises(Killed):
        place.run(killing(place, 1, lambda event: last_answer(event, 2)))
    place.restore()
    behind = place.charges()[RESTORED]
    assert place.run().status == "completed"
    (told,) = [e.message for e in place.seen if isinstance(e, events.Warned)]
    assert told.startswith(f"site '{RESTORED}' does not take part: ")
    assert "crossfed ledger recover" in told
    assert place.charges()[RESTORED] == behind
    rounds = [e for e in place.seen if isinstance(e, events.RoundFinished)]
    assert [e.status for e in rounds] == ["completed"] * 4
