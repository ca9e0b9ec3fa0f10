"""Sizes of machines change between rounds, as the run's events suggest."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.event_samples import TWO_SITES, Script, run as played

from deploy.cli import up_verb
from deploy.fleet import spec
from deploy.fleet.placement import SeenRun
from deploy.fleet.sizes import Sizer
from deploy.fleet.spec import DeploymentPlan
from federation.clock import VirtualClock
from federation.errors import JobError
from federation.event_log import to_line
from federation.events import RoundFinished, RunFinished, SiteAnswered
from monitoring.runs.run_folder import RunFolder

SITE = """
[[sites]]
name = "{name}"
provider = "aws"
sizes = [
    {{ type = "g5.xlarge", speed = 1.0, dollars_per_hour = 1.0 }},
    {{ type = "g5.2xlarge", speed = 1.8, dollars_per_hour = 2.0 }},
    {{ type = "g5.4xlarge", speed = 3.2, dollars_per_hour = 6.0 }},
]
[sites.machine]
region = "us-east-1"
type = "g5.2xlarge"
[sites.home]
url = "file:///mnt/{name}"
"""
JOB = Path(__file__).parents[3] / "jobs" / "quickstart.toml"
SLOW = 600.0
ROUNDS = 100


def written(folder: Path, more: str = "") -> DeploymentPlan:
    path = folder / "fed.toml"
    sites = "".join(SITE.format(name=name) for name in TWO_SITES)
    path.write_text(f'name = "fed"\njob = "job.toml"\nfolder = "."\n{more}\n{sites}')
    return spec.load(path)


@pytest.fixture
def plan(tmp_path: Path) -> DeploymentPlan:
    return written(tmp_path)


def happens(folder: Path, rounds: int, *busy: float) -> RunFolder:
    """A run that has ended so many rounds, with the seconds of each site in them."""
    seconds = dict(zip(TWO_SITES, busy, strict=True))
    lines = []
    for event in played(Script(rounds=ROUNDS, stop_after=rounds)):
        if isinstance(event, SiteAnswered):
            end = event.asked_seconds + seconds[event.site]
            lines.append(to_line(replace(event, answered_seconds=end)))
        elif isinstance(event, RoundFinished):
            lines.append(to_line(replace(event, seconds=max(busy) + 1.0)))
        elif not isinstance(event, RunFinished):
            lines.append(to_line(event))
    run = RunFolder(folder / "run")
    run.path.mkdir(exist_ok=True)
    run.events.write_text("".join(f"{line.rstrip()}\n" for line in lines))
    return run


def types(plan: DeploymentPlan) -> list[str]:
    return [site.machine.type for site in plan.file.sites]


def sizer(plan: DeploymentPlan, tell: Callable[[str], None] = print) -> Sizer:
    return Sizer(plan, None, SeenRun(RunFolder(plan.folder / "run")), ROUNDS, tell)


def test_an_idle_site_shrinks_and_says_why(plan: DeploymentPlan):
    told: list[str] = []
    ours = sizer(plan, told.append)
    happens(plan.folder, 4, SLOW, SLOW / 4)
    assert types(ours.wanted(plan, 0.0)) == ["g5.2xlarge", "g5.xlarge"]
    (line,) = told
    assert "expected to cost $" in line
    assert "g5.xlarge" in line


def test_the_slowest_site_grows_when_the_deadline_is_near(tmp_path: Path):
    plan = written(tmp_path, "deadline_hours = 14.0")
    ours = sizer(plan)
    run = happens(plan.folder, 4, SLOW, SLOW * 0.9)
    began = run.view().first_started_at
    assert types(ours.wanted(plan, began)) == ["g5.4xlarge", "g5.2xlarge"]


def test_nothing_changes_before_three_rounds_or_for_a_small_saving(
    plan: DeploymentPlan,
):
    ours = sizer(plan)
    happens(plan.folder, 3, SLOW, SLOW / 4)
    for now in (0.0, 1e12, -1e12):  # A clock that jumps decides nothing.
        assert ours.wanted(plan, now) == plan
    happens(plan.folder, 4, SLOW, SLOW)
    assert ours.wanted(plan, 0.0) == plan


def test_three_whole_rounds_pass_between_two_changes(plan: DeploymentPlan):
    """The first round on new machines does not count, so nothing swings."""
    ours = sizer(plan)
    happens(plan.folder, 4, SLOW, SLOW / 4)
    changed = ours.wanted(plan, 0.0)
    assert changed != plan
    happens(plan.folder, 5, SLOW, SLOW / 4)
    ours.changed()
    for ended in (6, 7, 8):
        happens(plan.folder, ended, SLOW / 8, SLOW)
        assert ours.wanted(changed, 0.0) == changed
    happens(plan.folder, 9, SLOW / 8, SLOW)
    assert types(ours.wanted(changed, 0.0)) != types(changed)


def test_a_change_beyond_the_budget_is_not_made(tmp_path: Path):
    """Though a deadline calls for it."""
    plan = written(tmp_path, "deadline_hours = 14.0\nmax_dollars = 20.0")
    ours = sizer(plan)
    run = happens(plan.folder, 4, SLOW, SLOW * 0.9)
    assert ours.wanted(plan, run.view().first_started_at) == plan


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"g5.2xlarge"\n[sites.home]', '"m5.large"\n[sites.home]', "sizes"),
        ('url = "file:', '# "', "home.url"),
        ('provider = "aws"', 'provider = "aws"\ndollars_per_hour = 1.0', "dollars"),
    ],
)
def test_sizes_that_a_site_could_not_move_between_are_refused(
    plan: DeploymentPlan, old: str, new: str, key: str
):
    text = plan.path.read_text()
    assert old in text
    plan.path.write_text(text.replace(old, new, 1))
    with pytest.raises(JobError, match=rf"sites\[0\]\.{key}"):
        spec.load(plan.path)


MORE = """
identity = "p"
role = "arn:aws:iam::123456789012:role/r"
"""
RELEASE = f"""
[release]
wheel = "https://example.org/x.whl"
sha256 = "{"ab" * 32}"
"""


def test_up_checks_the_prices_of_sizes_that_it_may_use(tmp_path: Path):
    """Before it asks a cloud for anything."""
    plan = written(tmp_path, 'aggregator = { address = "192.0.2.1:8443" }')
    text = plan.path.read_text().replace('"g5.xlarge", speed', '"g9.large", speed')
    text = text.replace("= 1.0, dollars_per_hour = 1.0", "= 1.0")
    text = text.replace('type = "g5.2xlarge"\n', f'type = "g5.2xlarge"{MORE}')
    plan.path.write_text(f"{text.replace('job.toml', str(JOB))}{RELEASE}")
    options = Namespace(
        deployment=plan.path,
        provider="",
        containers=False,
        images="",
        keep=True,
        detach=False,
        clock=VirtualClock(1.782e9),
    )
    with pytest.raises(JobError, match=r"sites\[0\]\.sizes"):
        up_verb._checked(options)


def test_a_change_that_takes_longer_than_it_saves_is_not_made(tmp_path: Path):
    plan = written(tmp_path, "start = { machine_minutes = 600.0 }")
    ours = sizer(plan)
    happens(plan.folder, 4, SLOW / 4, SLOW / 16)
    assert ours.wanted(plan, 0.0) == plan
