"""Machines are started when hours, spot prices and carbon intensity allow it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cloud_adapters.compute.machine_types import SpotPrice
from cloud_adapters.compute.pool import Node, NodeState
from deploy.fleet import spec, spending, start_wait
from deploy.fleet.reconcile import DEPLOYMENT, ROLE
from deploy.fleet.spec import DeploymentPlan
from deploy.fleet.start_wait import allowed_start, await_start
from federation.clock import VirtualClock
from federation.errors import ComputeUnavailable, JobError

# A Thursday, 12:00 UTC.
NOON = datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0
FILE = """
name = "fed"
job = "job.toml"
start = {{ {start} }}
[[sites]]
name = "a"
provider = "aws"
[sites.machine]
region = "us-east-1"
zones = ["us-east-1a", "us-east-1b"]
type = "g5.xlarge"
market = "{market}"
[[sites]]
name = "here"
"""


def written(folder: Path, start: str, market: str = "spot") -> DeploymentPlan:
    path = folder / "fed.toml"
    path.write_text(FILE.format(start=start, market=market))
    return spec.load(path)


class Market:
    """A cloud whose prices a test states: of each zone, given the time."""

    def __init__(self, price: Callable[[float], Sequence[float]]) -> None:
        self.price, self.asked = price, 0

    def spot_prices(
        self, machine: str, zones: Sequence[str], since: float
    ) -> Sequence[SpotPrice]:
        assert machine == "g5.xlarge"
        self.asked += 1
        return [
            SpotPrice(zone=zone, at=since, dollars_per_hour=dollars)
            for zone, dollars in zip(zones, self.price(since), strict=True)
        ]


class Waited:
    """What became of a wait that began at noon."""

    def __init__(self, plan: DeploymentPlan, market: Market | None = None) -> None:
        self.told: list[str] = []
        clock = VirtualClock(NOON)
        await_start(
            plan, lambda: {"aws us-east-1": market}, clock=clock, tell=self.told.append
        )
        self.hours = (clock.now() - NOON) / HOUR


def test_a_spot_price_is_waited_for_in_every_zone(tmp_path: Path):
    """The cloud's own prices, read every five minutes; one at the cap is allowed."""
    plan = written(tmp_path, "max_spot_dollars_per_hour = 0.4")
    market = Market(lambda now: (0.3, 0.6 if now < NOON + 2 * HOUR else 0.4))
    waited = Waited(plan, market)
    assert waited.hours == pytest.approx(2.0, abs=0.1)
    assert 24 <= market.asked <= 26
    (line,) = waited.told
    assert (
        "start.max_spot_dollars_per_hour: a spot g5.xlarge in us-east-1: $0.6" in line
    )


def test_a_price_that_cannot_be_read_holds_back_but_for_the_first_time(tmp_path: Path):
    """Then, a person is there to grant the permission."""
    plan = written(tmp_path, "max_spot_dollars_per_hour = 0.4")

    def price(now: float) -> Sequence[float]:
        if NOON < now < NOON + HOUR:
            raise ComputeUnavailable("no route to the service")
        return (0.3, 0.5 if now == NOON else 0.3)

    assert Waited(plan, Market(price)).hours == pytest.approx(1.0, abs=0.1)
    with pytest.raises(ComputeUnavailable):
        Waited(plan, Market(lambda _: price(NOON + 1.0)))


def test_a_price_table_that_has_become_unreadable_holds_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A new one may be copied over it just now."""
    start = "max_spot_dollars_per_hour = 0.01, at_latest_hours = 6"
    plan = written(tmp_path, start)
    table = tmp_path / "prices.toml"
    table.write_text((Path(spending.__file__).with_name("prices.toml")).read_text())
    plan = replace(plan, prices=table)

    def sleep(self: VirtualClock, seconds: float) -> None:
        real(self, seconds)
        table.write_text("")

    real = VirtualClock.sleep
    monkeypatch.setattr(VirtualClock, "sleep", sleep)
    assert Waited(plan).hours == pytest.approx(6.0, abs=0.1)


class Running(Market):
    """A cloud in which a machine of the deployment may run."""

    def __init__(self, state: NodeState, role: str) -> None:
        super().__init__(lambda _: (0.3, 0.3))
        labels = {ROLE: role, DEPLOYMENT: "fed"}
        self.node = Node(id="i-1", name=role, state=state, labels=labels, launched=NOON)

    def nodes(self, labels: Mapping[str, str]) -> Sequence[Node]:
        assert labels == {DEPLOYMENT: "fed"}
        return [self.node]


@pytest.mark.parametrize(
    ("state", "role", "waits"),
    [
        (NodeState.RUNNING, "site-a", False),
        (NodeState.STARTING, "site-a", False),
        (NodeState.GONE, "site-a", True),
        (NodeState.RUNNING, "aggregator", True),
    ],
)
def test_machines_that_run_do_not_wait(
    tmp_path: Path,
    state: NodeState,
    role: str,
    waits: bool,  # noqa: FBT001
):
    """They cost, and what is missing beside them is a replacement."""
    plan = written(tmp_path, 'window = "20:00-22:00 UTC"')
    cloud = Running(state, role)
    assert Waited(plan, cloud).hours > 7.0  # No command was given before.
    plan.folder.mkdir(parents=True)
    assert (Waited(plan, cloud).hours > 7.0) == waits


@pytest.mark.slow
def test_all_conditions_must_hold_at_once(tmp_path: Path):
    """The window counts also when the others no longer do."""
    start = (
        'window = "20:00-22:00 UTC", max_spot_dollars_per_hour = 0.01, '
        "at_latest_hours = 1"
    )
    waited = Waited(written(tmp_path, start))
    assert waited.hours == pytest.approx(8.0, abs=0.1)
    first, second = waited.told
    assert "start.window: it opens" in first
    assert "start.max_spot_dollars_per_hour: a spot" in first
    assert "max_spot" not in second


@pytest.mark.parametrize(
    ("start", "market", "key"),
    [
        ("max_spot_dollars_per_hour = 1", "on-demand", "max_spot_dollars_per_hour"),
        ("at_latest_hours = 1", "spot", "at_latest_hours: has no effect"),
        ("max_spot_dollars_per_hour = 0", "spot", "max_spot_dollars_per_hour"),
        ("max_grams_per_kwh = 200", "spot", "carbon: is missing"),
        ('carbon = "carbon.toml"', "spot", "carbon: has no effect"),
        ("max_grams_per_kwh = 0", "spot", "max_grams_per_kwh"),
    ],
)
def test_conditions_that_could_hold_back_nothing_are_refused(
    tmp_path: Path, start: str, market: str, key: str
):
    with pytest.raises(JobError, match=f"start.{key}"):
        written(tmp_path, start, market)


CARBON = """
source = "a forecast"
[[intensity]]
region = "us-east-1"
grams_per_kwh = {now}
[[intensity]]
region = "us-east-1"
grams_per_kwh = 100
begins = "2026-11-26T16:00:00+01:00"
ends = "2026-11-26T17:00:00+00:00"
"""


def test_a_clean_hour_is_waited_for(tmp_path: Path):
    """From 15:00 to 17:00 UTC in this table, unless a new one says otherwise."""
    plan = written(tmp_path, 'max_grams_per_kwh = 200, carbon = "carbon.toml"')
    table = tmp_path / "carbon.toml"
    table.write_text(CARBON.format(now=380))
    waited = Waited(plan)
    assert waited.hours == pytest.approx(3.0, abs=0.1)
    assert (
        "start.max_grams_per_kwh: us-east-1: 380 g/kWh; at most 200" in waited.told[0]
    )
    table.write_text(CARBON.format(now=200))
    assert Waited(plan).hours == 0.0


def test_unknown_carbon_intensity_holds_a_start_back_until_the_latest_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A gap in the table, and a table that is being rewritten."""
    start = 'max_grams_per_kwh = 200, carbon = "carbon.toml", at_latest_hours = 6'
    plan, table = written(tmp_path, start), tmp_path / "carbon.toml"
    table.write_text(CARBON.format(now='380\nends = "2020-01-01T00:00:00Z"'))
    waited = Waited(plan)
    assert waited.hours == pytest.approx(3.0, abs=0.1)
    assert "us-east-1: unknown" in waited.told[0]
    start_wait.forget_wait(plan)
    real = VirtualClock.sleep

    def sleep(self: VirtualClock, seconds: float) -> None:
        real(self, seconds)
        table.write_text("")

    monkeypatch.setattr(VirtualClock, "sleep", sleep)
    assert Waited(plan).hours == pytest.approx(6.0, abs=0.1)


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("us-east-1", "us-west-2", "start.carbon.*no row of us-east-1"),
        ("T17:00:00+00:00", "T17:00:00", r"carbon.toml: intensity\[1\].ends"),
        ("T17:00:00+00:00", "T15:00:00+00:00", r"intensity\[1\].ends.*not after"),
        ("380", "38000", "grams_per_kwh"),
        ("source", "sources", "carbon.toml: sources"),
    ],
)
def test_a_wrong_table_of_carbon_intensity_is_refused(
    tmp_path: Path, before: str, after: str, match: str
):
    plan = written(tmp_path, 'max_grams_per_kwh = 200, carbon = "carbon.toml"')
    text = CARBON.format(now=380).replace(before, after)
    (tmp_path / "carbon.toml").write_text(text)
    with pytest.raises(JobError, match=match):
        Waited(plan)


def test_a_wait_that_was_interrupted_goes_on(tmp_path: Path):
    """It counts from the first command, until machines may start or crossfed down."""
    start = "max_spot_dollars_per_hour = 0.01, at_latest_hours = 6"
    plan, told = written(tmp_path, start), list[str]()
    assert start_wait.first_asked(plan, NOON - 4 * HOUR, told.append) == NOON - 4 * HOUR
    plan.folder.mkdir(parents=True, exist_ok=True)
    plan.folder.rmdir()
    waited = Waited(plan)
    assert waited.hours == pytest.approx(2.0, abs=0.1)
    assert "began to wait 4.0 h ago" in waited.told[0]
    start_wait.forget_wait(plan)
    assert Waited(plan).hours == pytest.approx(6.0, abs=0.1)


class Killed(BaseException):
    """A command ends at a chosen moment, as by SIGKILL: nothing is tidied up."""


@pytest.mark.parametrize("makes_folder", [False, True])
def test_a_command_that_is_killed_before_its_machines_run_has_started_nothing(
    tmp_path: Path,
    makes_folder: bool,  # noqa: FBT001
):
    """The next one counts from the same first ask, whether or not a folder was made."""
    start = "max_spot_dollars_per_hour = 0.01, at_latest_hours = 6"
    plan, clock = written(tmp_path, start), VirtualClock(NOON)
    gone = {"aws us-east-1": Running(NodeState.GONE, "site-a")}
    gone["aws us-east-1"].price = lambda _: (0.3, 0.3)

    def begin(*, is_killed: bool) -> tuple[float, Sequence[str]]:
        told, before = list[str](), clock.now()
        with allowed_start(plan, lambda: gone, clock=clock, tell=told.append):
            took = (clock.now() - before) / HOUR
            if makes_folder:
                plan.folder.mkdir(parents=True, exist_ok=True)
            if is_killed:
                raise Killed
        return took, told

    with pytest.raises(Killed):
        begin(is_killed=True)
    clock.sleep(0.5 * HOUR)
    for _ in range(2):
        with pytest.raises(Killed):
            begin(is_killed=True)
    took, told = begin(is_killed=False)
    assert took == 0.0
    assert "began to wait 6.5 h ago" in told[0]
    assert not [*plan.folder.parent.glob("*start*"), *plan.folder.glob("start*")]
    assert begin(is_killed=False)[0] == pytest.approx(6.0, abs=0.1)


def test_a_wait_begins_anew_under_other_conditions_or_after_down(tmp_path: Path):
    """And not with a time to come, where the clock was set back."""
    start = "max_spot_dollars_per_hour = 0.01, at_latest_hours = {}"
    plan, told = written(tmp_path, start.format(6)), list[str]()
    for folder in (False, True):
        if folder:
            plan.folder.mkdir(parents=True)
        assert start_wait.first_asked(plan, 100.0, told.append) == 100.0
        assert start_wait.first_asked(plan, 90.0, told.append) == 90.0
        assert start_wait.first_asked(plan, 110.0, told.append) == 90.0
        other = written(tmp_path, start.format(7))
        assert start_wait.first_asked(other, 120.0, told.append) == 120.0
        start_wait.forget_wait(plan)
        assert start_wait.first_asked(plan, 130.0, told.append) == 130.0
        start_wait.forget_wait(plan)
    assert not [*plan.folder.parent.glob("*start*")]
