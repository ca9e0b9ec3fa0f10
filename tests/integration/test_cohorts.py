"""What sums over different sites give away, between runs and within one.

Attacks by an aggregator that keeps everything it sees, on agents with folders of their
own; the runs are short and their data is small.
"""

import itertools
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import agents
from support.agents import OPEN_POLICY, AgentGrid, Consortium, consortium
from support.secure_runs import Run, in_the_clear, run, secure_job, silence
from support.small_jobs import small_job
from support.without_report import simulate

from clients.models import logistic_regression
from clients.models.starting_weights import pinned
from clients.privacy.site_memory import FileMemory
from cloud_adapters.local.faults import Restartable
from deploy.aggregator_host.deployed_run import DeployedRun
from federation import events
from federation.clock import SystemClock
from federation.errors import FederationError, QuorumNotMet, SiteError
from federation.job import job_file
from federation.job.evaluation_job import make_evaluation
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from monitoring.runs.run_folder import RunFolder
from privacy.secagg.protocol import train

pytestmark = pytest.mark.slow

SITES = tuple(f"site-{i}" for i in range(7))
TEN = tuple(f"site-{i}" for i in range(10))
POLICY = {**OPEN_POLICY, "min_sites": 3, "accept_dropouts": False}


@dataclass
class World:
    """An aggregator and agents, over several runs."""

    folder: Path
    policy: Mapping[str, Any] = field(default_factory=dict)
    seen: list[events.Event] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    silent: Collection[str] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] = SITES

    def __post_init__(self) -> None:
        self.members: Consortium = consortium(*self.names)
        self.numbers = itertools.count(1)
        self.grid = AgentGrid({name: self.agent(name) for name in self.names})

    def agent(self, name: str) -> Any:
        """A site's agent, as it is after a start of its process."""
        found = agents.agent(
            self.folder,
            name,
            self.members,
            policy={**POLICY, **self.policy},
            **self.tables,
        )
        found.listener = self.heard.append
        return found

    def run(self, job: JobSpec) -> Mapping[str, np.ndarray]:
        """Run a job to its end, as a run of its own; the weights it ends with."""
        number = next(self.numbers)
        folder = RunFolder(self.folder / "runs" / f"20260102-030405-{number:06x}")
        folder.path.mkdir(parents=True)
        folder.write_job(job)
        made = DeployedRun(
            folder,
            self.members.parties,
            clock=SystemClock(),
            listeners=[self.seen.append],
            report=False,
        )
        try:
            return made.run(self._connect).weights
        finally:
            for each in self.grid.agents.values():
                each.close()

    def answered(self) -> list[int]:
        """How many updates each round had."""
        finished = [e for e in self.seen if isinstance(e, events.RoundFinished)]
        return [len(e.answered) for e in finished]

    def _connect(self, *args: Any, **kwargs: Any) -> Any:
        fault = silence("mask", self.silent)
        return self.grid.connect(*args, fault=fault, **kwargs)


def job_of(sites: Collection[str], **changes: Any) -> JobSpec:
    """One round over some sites, all of which must answer."""
    changes = {"rounds": 1, "evaluation": {"every": 0}, "max_examples": 60} | changes
    made = secure_job(len(sites), threshold=len(sites), **changes)
    named = [replace(made.sites[0], name=name) for name in sites]
    return replace(made, sites=tuple(named))


def norm(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """Largest difference between two models."""
    return max(float(np.abs(one[k] - other[k]).max()) for k in one)


def test_run_without_a_site_of_the_run_before_is_refused(tmp_path: Path):
    """Of five sums and then four the difference is the fifth site's update."""
    world = World(tmp_path)
    world.run(job_of(SITES[:5]))
    with pytest.raises(SiteError, match=r"would single out site-4.*policy\.min_group"):
        world.run(job_of(SITES[:4]))


# To logistic regression in three classes, a fourth that no weight reaches adds nothing.
FOUR_CLASSES = {
    "factory": "clients.models:logistic_regression",
    "options": {"inputs": 4, "classes": 4},
}


@pytest.mark.parametrize(
    "changes",
    [{"seed": 9}, {"rounds": 2}, {"name": "other"}, {"model": FOUR_CLASSES}],
)
def test_another_job_on_the_same_data_is_the_same_lineage(
    tmp_path: Path, changes: dict[str, Any]
):
    """Seed, rounds, name and model are the aggregator's to choose."""
    world = World(tmp_path)
    world.run(job_of(SITES[:5]))
    with pytest.raises(SiteError, match="would single out site-4"):
        world.run(job_of(SITES[:4], **changes))


def test_two_layouts_can_have_one_update():
    """The aggregator sends the weights: a class that it rules out changes nothing."""
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(20) % 3
    gradients = []
    for classes in (3, 4):
        model = logistic_regression(inputs=4, classes=classes)
        with torch.no_grad():
            model[1].bias[3:] = -1e9
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        gradients.append(model[1].weight.grad)
    assert torch.equal(gradients[0], gradients[1][:3])


def test_cohorts_are_remembered_when_runs_are_deleted_and_agents_restart(
    tmp_path: Path,
):
    """The memory is the site's own, not a run's."""
    world = World(tmp_path)
    world.run(job_of(SITES[:5]))
    for name in SITES[:5]:
        (folder,) = (tmp_path / name / "runs").iterdir()
        folder.rename(tmp_path / f"deleted-{name}")
        world.grid.agents[name] = world.agent(name)
    with pytest.raises(SiteError, match="would single out site-4"):
        world.run(job_of(SITES[:4]))


FORGOTTEN = r"cohorts\.json is missing .* 20260102-030405-000001: .*min_group = 1"


@pytest.mark.parametrize("lost", ["cohorts.json", ""])
@pytest.mark.parametrize("groups", [False, True])
def test_site_that_has_lost_its_cohorts_joins_no_sum(
    tmp_path: Path, lost: str, *, groups: bool
):
    """Its runs show that there were some: one file is gone, or all of the memory."""
    world = World(tmp_path, names=TEN[:9])
    world.run(job_of(SITES[:5]))
    memory, aside = tmp_path / "site-0" / "memory" / lost, tmp_path / "aside"
    memory.rename(aside)
    world.grid.agents["site-0"] = world.agent("site-0")
    for _ in range(2):  # Being asked again changes nothing.
        with pytest.raises(SiteError, match=FORGOTTEN):
            world.run(by_groups(TEN[:9]) if groups else job_of(SITES[:4]))
    if not lost:
        shutil.rmtree(memory)
    aside.rename(memory)
    with pytest.raises(SiteError, match="would single out site-4"):
        world.run(job_of(SITES[:4]))


def test_operator_may_accept_that_cohorts_are_lost(tmp_path: Path):
    """For one run, whose sites are remembered again."""
    world = World(tmp_path)
    world.run(job_of(SITES[:3]))
    (tmp_path / "site-0" / "memory" / "cohorts.json").unlink()
    with pytest.raises(SiteError, match=FORGOTTEN):
        world.run(job_of(SITES[:3]))
    world.grid.agents["site-0"] = agents.agent(
        tmp_path, "site-0", world.members, policy={**POLICY, "min_group": 1}
    )
    world.run(job_of(SITES[:3]))
    world.grid.agents["site-0"] = world.agent("site-0")
    world.run(job_of(SITES[:3]))
    with pytest.raises(SiteError, match="would single out"):
        world.run(job_of((SITES[0], *SITES[3:6])))


@pytest.mark.parametrize("serial", [1, 2])
def test_name_with_another_key_is_in_a_sum_only_by_every_operators_roster(
    tmp_path: Path, serial: int
):
    """A stranger under its name, and a difference of sums, would give a site away.

    Cohorts go by name, so that a site may replace its key. Which key a name has is in
    the roster that each site's operator has compared.
    """
    world = World(tmp_path)
    world.run(job_of(SITES[:5]))
    old = world.members
    stranger = consortium("site-4").sites["site-4"]
    changed = tuple(
        replace(e, public_key=stranger.public.key) if e.site == "site-4" else e
        for e in old.roster.sites
    )
    world.members = replace(
        old,
        sites={**old.sites, "site-4": stranger},
        roster=replace(old.roster, serial=serial, sites=changed),
    )
    world.grid.agents["site-4"] = world.agent("site-4")
    for name in SITES[:4]:
        with pytest.raises(SiteError, match=f"{name}' has roster 1, but the run has"):
            world.run(job_of(SITES[:5]))
        # As after its operator has taken the roster.
        world.grid.agents[name] = world.agent(name)
    world.run(job_of(SITES[:5]))


def test_data_that_move_are_remembered_and_keep_their_name(tmp_path: Path):
    """By the name that their operator gives them, and cannot change in passing."""
    world = World(tmp_path)
    world.run(job_of(SITES[:5]))
    blobs = {"source": "support.small_jobs:blobs"}
    for data, reason in (
        (blobs, "would single out site-4"),
        ({"name": "others"}, r"Set data\.name to 'records'"),
    ):
        world.tables = {"data": data}
        for name in SITES[:4]:
            world.grid.agents[name] = world.agent(name)
        with pytest.raises(SiteError, match=reason):
            world.run(job_of(SITES[:4]))


def test_run_that_never_had_all_its_sites_counts_for_nothing(tmp_path: Path):
    """Nothing of it was summed: the setup needs everybody."""
    world = World(tmp_path)
    far = world.grid.agents["site-4"]
    world.grid.agents["site-4"] = Restartable(lambda: far)  # Introduces itself only.
    world.grid.agents["site-4"].introduce = far.introduce
    with pytest.raises(FederationError):
        world.run(job_of(SITES[:5]))
    world.grid.agents["site-4"] = far
    world.run(job_of(SITES[:4]))


def private_job(sites: Collection[str], every: int = 0, **unit: Any) -> JobSpec:
    """One round with differential privacy, for records unless said otherwise."""
    made = job_of(
        sites,
        evaluation={"every": every},
        aggregation={"weights": "uniform"},
        training={
            "local_steps": 1,
            "batch_size": 10,
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
    )
    unit = {"unit": "record", "target_epsilon": 3.0, "delta": 1e-5} | unit
    unit["accept_low_signal"] = unit["unit"] == "site"
    private = replace(made.privacy.differential_privacy, **unit)
    return replace(made, privacy=replace(made.privacy, differential_privacy=private))


@pytest.mark.parametrize("unit", ["record", "joint", "site"])
def test_private_run_without_a_site_of_an_open_run_is_refused(
    tmp_path: Path, unit: str
):
    """Noise of the four others alone would hide the fifth site's update."""
    world = World(tmp_path)
    world.run(job_of(SITES[:5]))
    with pytest.raises(SiteError, match=r"sites: .*would single out site-4, but"):
        world.run(private_job(SITES[:4], unit=unit))
    world.run(private_job(SITES[:6], unit=unit))  # Whose own noise hides site-5.


def test_open_run_with_one_site_more_than_a_private_run_is_refused(tmp_path: Path):
    """The other order; whatever is deleted of the runs, and after a restart."""
    world = World(tmp_path)
    world.run(private_job(SITES[:4]))
    for name in SITES[:5]:
        for folder in (tmp_path / name / "runs").glob("*"):
            folder.rename(tmp_path / f"deleted-{name}")
        world.grid.agents[name] = world.agent(name)
    with pytest.raises(SiteError, match="would single out site-4, but"):
        world.run(job_of(SITES[:5]))
    world.run(job_of(SITES[:4]))
    world.run(private_job(SITES[:4]))


@pytest.mark.parametrize(
    ("weak", "reason"),
    [
        ({"target_epsilon": 20.0}, "its epsilon is above 8 .policy.max_epsilon"),
        ({"delta": 1e-3}, "its delta is above 0.0001 .policy.max_delta"),
        ({"held_out": "public", "every": 1}, "declares held-out data public"),
    ],
)
def test_a_promise_that_says_nothing_makes_no_run_private(
    tmp_path: Path, weak: dict[str, Any], reason: str
):
    """Else two runs with hardly any noise could differ by one site."""
    world = World(tmp_path)
    world.run(private_job(SITES[:5], **weak))
    with pytest.raises(SiteError, match=f"would single out site-4, but.*{reason}"):
        world.run(private_job(SITES[:4], **weak))


@pytest.mark.parametrize("accepts", [False, True])
def test_dropouts_of_private_rounds_do_not_split_open_groups(
    tmp_path: Path, *, accepts: bool
):
    """A private sum without the silent site, beside an open one with it."""
    world = World(tmp_path, {"accept_dropouts": accepts})
    world.run(job_of(SITES[:5]))
    made = replace(private_job(SITES[:5]), rounds=2)
    secure = replace(made.privacy.secure_aggregation, threshold=4)
    made = replace(made, privacy=replace(made.privacy, secure_aggregation=secure))
    world.silent = SITES[4:5]
    world.seen.clear()
    world.run(made)
    finished = [e for e in world.seen if isinstance(e, events.RoundFinished)]
    first = "completed" if accepts else "lost"
    assert [e.status for e in finished] == [first, "completed"]
    reasons = [e.message for e in world.seen if isinstance(e, events.SiteFailed)]
    assert any("would single out site-4" in text for text in reasons) != accepts


def free_job(sites: Collection[str], size: int = 3, **how: Any) -> JobSpec:
    """Three models, each of whichever sites are ready first."""
    made = replace(private_job(sites, **how), rounds=3)
    schedule = replace(made.schedule, mode="buffered", buffer_size=size)
    secure = replace(made.privacy.secure_aggregation, threshold=None)
    privacy = replace(made.privacy, secure_aggregation=secure)
    return replace(made, schedule=schedule, privacy=privacy)


def test_private_runs_may_sum_whoever_is_ready(tmp_path: Path):
    """Each site remembers that its sums may have been of any sites."""
    world = World(tmp_path)
    world.run(free_job(SITES[:5]))
    world.run(free_job(SITES[:5]))
    world.run(private_job(SITES[:4]))
    assert world.answered()[:3] == [3, 3, 3]
    with pytest.raises(SiteError, match="would single out"):
        world.run(job_of(SITES[:5]))


def test_sums_of_whoever_is_ready_split_no_sum_without_noise(tmp_path: Path):
    """With any three of five, beside an open sum of all, two are singled out."""
    world = World(tmp_path)
    world.run(job_of(SITES[:5]))
    with pytest.raises(SiteError, match="would single out site-0"):
        world.run(free_job(SITES[:5]))


@pytest.mark.parametrize(
    ("policy", "how", "said"),
    [
        ({}, {"target_epsilon": 20.0}, r"schedule\.groups.*its epsilon is above 8"),
        ({}, {"size": 2}, r"buffer_size: .*requires 3 in .*min_sites.*, .*over 2 of 5"),
        ({"colluding_sites": 2}, {}, r"buffer_size: .*against 2 .*colluding_sites"),
    ],
    ids=["epsilon", "min_sites", "colluding"],
)
def test_sums_of_whoever_is_ready_that_an_operator_refuses(
    tmp_path: Path, policy: dict[str, Any], how: dict[str, Any], said: str
):
    world = World(tmp_path, policy)
    with pytest.raises(SiteError, match=said):
        world.run(free_job(SITES[:5], **how))


def test_equal_seeds_do_not_give_equal_batches_under_secure_aggregation(
    tmp_path: Path,
):
    """Two runs of one job differ by more than the rounding: each has its own order."""
    world = World(tmp_path)
    training = {
        "local_steps": 2,
        "batch_size": 4,
        "optimizer": {"name": "sgd", "lr": 0.5},
    }
    made = job_of(SITES[:3], training=training)
    one, other = world.run(made), world.run(made)
    assert norm(one, other) > 1e-3
    again = simulate(made).weights
    assert norm(again, simulate(made).weights) < 1e-5  # A rehearsal repeats itself.


def by_groups(sites: Collection[str], **changes: Any) -> JobSpec:
    """One round by the median of three groups."""
    median = {"combine": "median", "byzantine_sites": 1, "weights": "uniform"}
    options = {"num_train": 150, "num_held_out": 30}
    data = {"source": "support.small_jobs:blobs", "options": options}
    return job_of(sites, groups=3, aggregation=median, data=data, **changes)


def cohorts_of(world: World) -> dict[str, set[frozenset[str]]]:
    """What each site remembers of the sums that it has joined."""
    found = {}
    for name in world.names:
        known = FileMemory(world.folder / name / "memory").read("cohorts")
        listed = [group for mine in known.values() for group in mine["cohorts"]]
        found[name] = set(map(frozenset, listed))
    return found


def test_groups_are_the_same_in_every_run_on_the_same_data(tmp_path: Path):
    """Whatever job, seed and model, and after every agent's restart: one cohort."""
    world = World(tmp_path, names=TEN[:9])
    world.run(by_groups(TEN[:9]))
    before = cohorts_of(world)
    for name in world.names:
        world.grid.agents[name] = world.agent(name)
    model = {"factory": "clients.models:mlp", "options": {"inputs": 4, "classes": 3}}
    world.run(by_groups(TEN[:9], seed=9, name="other", rounds=2, model=model))
    assert before == cohorts_of(world)
    for name, (group,) in before.items():
        assert name in group
        assert len(group) == 3
        assert all(before[other] == {group} for other in group)


def test_groups_of_other_sites_are_not_drawn_on_the_same_data(tmp_path: Path):
    """Or an aggregator could change the sites until it likes the groups."""
    world = World(tmp_path, names=TEN)
    world.run(by_groups(TEN[:9]))
    before = cohorts_of(world)
    with pytest.raises(FederationError, match="has drawn 3 groups of site-0, site-1"):
        world.run(by_groups(TEN, schedule={"max_lost_rounds": 1}))
    assert {**before, "site-9": set()} == {**cohorts_of(world), "site-9": set()}


def test_one_sum_over_all_goes_with_groups_of_enough(tmp_path: Path):
    """Its difference to sums of groups is a group's sum, which was opened anyway."""
    world = World(tmp_path, names=TEN[:9])
    world.run(by_groups(TEN[:9]))
    world.run(job_of(TEN[:9]))
    with pytest.raises(SiteError, match="would single out"):
        world.run(job_of(TEN[:8]))


def test_groups_against_an_operators_policy_are_refused(tmp_path: Path):
    """By the keys of the job, before anything is drawn."""
    world = World(tmp_path, {"min_sites": 4}, names=TEN[:9])
    with pytest.raises(SiteError, match=r"requires 4 in a sum \(policy\.min_sites\)"):
        world.run(by_groups(TEN[:9]))
    assert not list(tmp_path.glob("*/memory/groups.json"))


def tolerant(num_sites: int = 5, *, threshold: int = 4, **changes: Any) -> JobSpec:
    """Two rounds over some sites, of which a few may be silent."""
    made = job_of(SITES[:num_sites], rounds=2, **changes)
    secure = replace(made.privacy.secure_aggregation, threshold=threshold)
    return replace(made, privacy=replace(made.privacy, secure_aggregation=secure))


def test_threshold_below_all_needs_each_operators_consent(tmp_path: Path):
    """One absence would give away what the absent site adds: refused before a round."""
    world = World(tmp_path)
    expected = r"threshold: .*up to 1 of 5 sites.*policy\.accept_dropouts"
    with pytest.raises(SiteError, match=expected):
        world.run(tolerant())


def test_run_that_tolerates_dropouts_says_what_that_costs(tmp_path: Path):
    """On the coordinator and at every site, before the first round."""
    world = World(tmp_path, {"accept_dropouts": True})
    world.run(tolerant())
    kinds = [type(e) for e in world.seen]
    (warned,) = [e.message for e in world.seen if isinstance(e, events.Warned)]
    assert "without up to 1 of their sites" in warned
    assert kinds.index(events.Warned) < kinds.index(events.RoundStarted)
    assert sum("without up to 1 of their sites" in text for text in world.heard) == 5


def test_different_steps_in_a_sum_need_each_operators_consent(tmp_path: Path):
    """Whose number changes would show in the difference of two sums."""
    schedule = {"allocation": "capacity"}
    made = job_of(SITES[:3], rounds=3, training={"local_steps": 4}, schedule=schedule)
    with pytest.raises(SiteError, match=r"allocation: .*policy\.accept_dropouts"):
        World(tmp_path / "refuses").run(made)
    world = World(tmp_path / "accepts", {"accept_dropouts": True})
    world.run(made)
    assert world.answered() == [3, 3, 3]
    (warned,) = [e.message for e in world.seen if isinstance(e, events.Warned)]
    assert "(schedule.allocation)" in warned


def test_dropout_with_consent_completes_the_round(tmp_path: Path):
    """And it is noted at the sites, where the operators can look."""
    world = World(tmp_path, {"accept_dropouts": True})
    world.silent = ["site-2"]
    world.run(tolerant())
    assert world.answered() == [4, 5]
    for name in ("site-0", "site-4"):
        text = (tmp_path / name / "memory" / "cohorts.json").read_text()
        assert '"accepted":[["site-0","site-1","site-3","site-4"]]' in text


@pytest.mark.parametrize(("silent", "status"), [(1, "lost"), (2, "completed")])
def test_survivors_without_consent_are_not_signed(
    tmp_path: Path, silent: int, status: str
):
    """Of seven, two may be absent together one may not; the next round runs."""
    world = World(tmp_path, {"min_group": 2})
    world.silent = SITES[-silent:]
    world.run(tolerant(7, threshold=5))
    finished = [e for e in world.seen if isinstance(e, events.RoundFinished)]
    assert [e.status for e in finished] == [status, "completed"]
    reasons = [e.message for e in world.seen if isinstance(e, events.SiteFailed)]
    assert any("would single out site-6" in text for text in reasons) == (silent == 1)


def unequal(*, threshold: int, **secure: Any) -> JobSpec:
    """Five sites of 61 training and 13 held-out examples, weighed by the former."""
    options = {"num_train": 61, "num_held_out": 13}
    data = {"source": "support.small_jobs:blobs", "options": options}
    return small_job(
        sites=[{"name": name, "data": data} for name in SITES[:5]],
        rounds=2,
        training={"local_epochs": 1, "batch_size": 8, "optimizer": {"lr": 0.1}},
        privacy={
            "secure_aggregation": {"enabled": True, "threshold": threshold} | secure
        },
    )


def sums(made: Run) -> list[tuple[MetricSums, MetricSums]]:
    """Training and evaluation of each round, over the sites in its sum."""
    trained = [e.training for e in made.seen if isinstance(e, events.RoundFinished)]
    held_out = [e.pooled for e in made.seen if isinstance(e, events.ModelEvaluated)]
    assert all(held_out)
    assert all(trained)
    return list(zip(trained, held_out, strict=False))  # type: ignore[arg-type]


def test_absence_tells_no_exact_number_of_examples():
    """The difference to a round with the site is on the public grid: 64 and 14."""
    job = unequal(threshold=4)
    made = run(job, fault=silence("mask", ["site-2"]))
    (trained, held_out), (all_trained, all_held_out) = sums(made)
    assert all_trained.count - trained.count == 64
    assert all_held_out.count - held_out.count == 14
    assert train.HEADER_SLOTS.count("examples") == 0


@pytest.mark.parametrize("threshold", [4, 5])
def test_a_decline_tells_no_exact_number_of_examples(threshold: int):
    """A site of 61 declines where 56 are the most, as one of 57 or of 64 does."""
    for most in (57, 60, 64):
        made = run(unequal(threshold=threshold, max_examples=most))
        assert made.statuses() == ["completed"] * 2
    with pytest.raises(QuorumNotMet):
        run(unequal(threshold=threshold, max_examples=56))


@pytest.mark.parametrize("threshold", [4, 5])
def test_numbers_on_the_grid_leave_mean_results_as_they_are(threshold: int):
    """Every site of the same size: loss as in the clear, hits to half a prediction."""
    job = unequal(threshold=threshold)
    for secure, clear in zip(sums(run(job)), sums(run(in_the_clear(job))), strict=True):
        for mine, theirs in zip(secure, clear, strict=True):
            assert mine.loss_sum / mine.count == pytest.approx(
                theirs.loss_sum / theirs.count, rel=1e-5
            )
            assert mine.accuracy == pytest.approx(theirs.accuracy, abs=0.5 / 13)
            if threshold == 5:  # All or nothing: no absence to tell by.
                assert mine.count == theirs.count


def test_statistics_over_sites_that_differ_by_one_are_refused(tmp_path: Path):
    """Whatever they ask: the difference of two counts would be that of one site."""
    sites = job_file.document(job_of(SITES[:5]))["sites"]
    data = job_file.document(job_of(SITES[:5]))["data"]
    column = {"names": ["0"], "low": -9.0, "high": 9.0}
    secure = {"secure_aggregation": {"enabled": True}}
    asked = {"name": "s", "data": data, "privacy": secure, "sites": sites}
    policy = {"statistics": {"min_count": 1, "exact_questions": 2}}
    own = {"data": {"source": "clients.data:breast_cancer"}}  # In both runs the same.
    world = World(tmp_path, policy, tables=own)
    world.run(job_file.parse(asked | {"statistics": {"columns": [column]}}))
    asked |= {"sites": sites[:4], "statistics": {"columns": [column | {"bins": 3}]}}
    with pytest.raises(SiteError, match=r"would single out site-4.*policy\.min_group"):
        world.run(job_file.parse(asked))


def test_noise_too_weak_to_count_does_not_show_small_cells(tmp_path: Path):
    """Cells are not left out with noise: an epsilon of a million hides none."""
    sites, policy = SITES[:3], {"privacy": "none", "total_epsilon": 1e9}
    document = job_file.document(job_of(sites))
    asked = {key: document[key] for key in ("data", "sites")} | {"name": "s"}
    column = {"names": ["0"], "low": -9.0, "high": 9.0, "bins": 3}
    asked["statistics"] = {"columns": [column]}
    noise = {"unit": "record", "target_epsilon": 1e6, "delta": 1e-5}
    secure = {"secure_aggregation": {"enabled": True}}
    job = job_file.parse(asked | {"privacy": secure | {"differential_privacy": noise}})
    with pytest.raises(SiteError, match=r"policy\.statistics\.min_count.*max_epsilon"):
        World(tmp_path / "few", policy).run(job)
    noise["target_epsilon"] = 4.0
    job = job_file.parse(asked | {"privacy": secure | {"differential_privacy": noise}})
    World(tmp_path / "enough", policy).run(job)


def test_sites_that_answered_exactly_train_privately_on_no_such_moments(
    tmp_path: Path,
):
    """Whatever noise the aggregator states: it may send what the exact run found."""
    sites, world = SITES[:3], World(tmp_path, {"statistics": {"min_count": 1}})
    document = job_file.document(job_of(sites))
    asked = {key: document[key] for key in ("data", "sites")} | {"name": "s"}
    asked["privacy"] = {"secure_aggregation": {"enabled": True}}
    column = {"names": ["0"], "low": -9.0, "high": 9.0}
    world.run(job_file.parse(asked | {"statistics": {"columns": [column]}}))
    job = private_job(sites)
    stated = replace(
        job.training,
        standardise="stats:s",
        moments={str(at): (0.5, 2.0) for at in range(4)},
        moments_privacy=(1.0, 1e-5),
    )
    job = replace(job, training=stated)
    world.run(job)  # The operators accept training without privacy.
    world.policy = {"privacy": "record"}
    world.grid = AgentGrid({name: world.agent(name) for name in sites})
    with pytest.raises(SiteError, match=r"exact statistics of 0, .*inputs"):
        world.run(job)
    rest = replace(stated, moments={"0": (0.0, 1.0)}, standardise="")
    world.run(replace(job, training=replace(rest, moments={}, moments_privacy=())))


def test_evaluations_over_sites_that_differ_by_one_are_refused(tmp_path: Path):
    """The difference of two sums of counts would be the confusion matrix of one."""
    save_file(logistic_regression(4, 3).state_dict(), tmp_path / "model.safetensors")
    document = job_file.document(job_of(SITES[:5]))
    make_evaluation(document, str(tmp_path))
    job, world = pinned(job_file.parse(document), Path()), World(tmp_path)
    world.run(job)
    world.run(job)  # The same question again has the same answer.
    evaluated = [e for e in world.seen if isinstance(e, events.ModelEvaluated)]
    assert [len(e.by_site) for e in evaluated] == [0, 0]
    assert evaluated[0].pooled == evaluated[1].pooled
    fewer = replace(job, sites=job.sites[:4])
    secure = replace(fewer.privacy.secure_aggregation, threshold=4)
    fewer = replace(fewer, privacy=replace(fewer.privacy, secure_aggregation=secure))
    with pytest.raises(SiteError, match=r"would single out site-4.*policy\.min_group"):
        world.run(fewer)
