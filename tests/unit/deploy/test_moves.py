"""Sites move to machines on demand while the deadline can still be kept."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_adapters.compute.machine_types import SpotMarket, SpotPrice
from cloud_adapters.compute.pool import Market, Node, NodeState
from deploy.fleet import deployment_file, spending
from deploy.fleet.choosing.spot_history import Sighting
from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.keeping.move_checks import check_moves
from deploy.fleet.keeping.moves import Mover
from deploy.fleet.keeping.run_progress import WorkLeft
from deploy.fleet.keeping.site_prices import check_prices
from deploy.fleet.keeping.spot_record import SpotRecord
from deploy.fleet.prices import MachinePrice, Prices
from federation.clock import VirtualClock
from federation.errors import ComputeUnavailable, CorruptObject, JobError

HOUR = 3600.0
BOOT_HOURS = 0.25  # As in the file: `start.machine_minutes` is 15 by default.
PRICES = Prices(
    as_of="2026-11-01",
    machines=(
        MachinePrice(
            provider="aws",
            region="us-east-1",
            machine="g5.xlarge",
            on_demand=1.0,
            spot=0.3,
        ),
    ),
    egress=(),
)


@pytest.fixture
def plan(tmp_path: Path) -> DeploymentPlan:
    path = tmp_path / "fed.toml"
    path.write_text("""
name = "fed"
job = "job.toml"
folder = "."
deadline_hours = 12.0
[[sites]]
name = "cloud"
provider = "aws"
[sites.machine]
region = "us-east-1"
type = "g5.xlarge"
market = "spot"
[sites.home]
url = "file:///mnt/home"
[[sites]]
name = "here"
""")
    return deployment_file.load(path)


def progress(rounds_left: int) -> Callable[[], WorkLeft]:
    """Of a run that has begun at 0, with rounds of an hour."""
    return lambda: WorkLeft(started=0.0, rounds_left=rounds_left, round_seconds=HOUR)


def mover_of(
    plan: DeploymentPlan,
    prices: Prices,
    known: Callable[[], WorkLeft | None],
    tell: Callable[[str], None],
    market: SpotMarket | None = None,
) -> Mover:
    markets = {} if market is None else {"aws us-east-1": market}
    return Mover(plan, prices, known, SpotRecord(plan.folder, markets, tell), tell)


def node(market: Market = Market.SPOT, **changes: object) -> Node:
    values = {
        "id": "i-1",
        "name": "site-cloud",
        "state": NodeState.RUNNING,
        "labels": {"crossfed-role": "site-cloud"},
        "market": market,
        "launched": 0.0,
    }
    return Node(**(values | changes))


def markets(plan: DeploymentPlan) -> list[str]:
    return [site.machine.market for site in plan.file.sites]


def test_a_spot_machine_stays_while_its_loss_could_be_made_up_for(
    plan: DeploymentPlan,
):
    told: list[str] = []
    mover = mover_of(plan, PRICES, progress(8), told.append)
    assert mover.moved(plan, [node()], 2 * HOUR) == plan
    assert not told


def test_a_lost_machine_is_replaced_on_demand_when_time_is_short(
    plan: DeploymentPlan,
):
    """With its reason, in words and on disk."""
    told: list[str] = []
    mover = mover_of(plan, PRICES, progress(8), told.append)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    found = mover.moved(plan, [node(state=NodeState.GONE)], now)
    assert markets(found) == ["on-demand", "on-demand"]
    (line,) = told
    assert "site-cloud: on-demand: aws us-east-1 g5.xlarge on-demand at $1.000" in line
    assert "slack before the deadline" in line
    row = json.loads((plan.folder / "decisions.jsonl").read_text())
    assert (row["role"], row["action"]) == ("site-cloud", "on-demand")
    assert row["reason"] in line


def test_it_stays_on_demand_to_the_end(plan: DeploymentPlan):
    """There is no time left to change."""
    mover = mover_of(plan, PRICES, progress(8), lambda _: None)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    moved = mover.moved(plan, [], now)
    again = mover.moved(moved, [node(Market.ON_DEMAND, launched=now)], now + 60.0)
    assert markets(again) == ["on-demand", "on-demand"]


def test_nothing_is_decided_before_the_first_round_or_after_the_last(
    plan: DeploymentPlan,
):
    for known in (lambda: None, progress(0)):
        mover = mover_of(plan, PRICES, known, lambda _: None)
        assert mover.moved(plan, [], 11.9 * HOUR) == plan


def test_a_missed_deadline_is_reported_once_before_and_once_after(
    plan: DeploymentPlan,
):
    """It has twelve hours for rounds of an hour; the run continues."""
    told: list[str] = []
    mover = mover_of(plan, PRICES, progress(8), told.append)
    machines = [node(Market.ON_DEMAND)]
    found: list[list[str]] = []
    for hours in (3.9, 4.1, 5.0, 12.0, 13.0):
        mover.moved(plan, machines, hours * HOUR)
        found.append([line for line in told if "deadline_hours" in line])
        told.clear()
    none, (early,), still, (late,), last = found
    assert none == still == last == []
    assert early == (
        "deadline_hours = 12 will probably be missed: 8 rounds left, 8.0 h at the pace "
        "so far, in 7.9 h"
    )
    assert "deadline_hours = 12 are over, with 8 rounds left" in late
    done: list[str] = []
    mover_of(plan, PRICES, progress(0), done.append).moved(plan, machines, 13 * HOUR)
    assert not done


def test_a_site_without_a_home_is_never_moved(plan: DeploymentPlan):
    """Its keys and its ledger would be lost; `up` refuses such a file, too."""
    text = plan.path.read_text().replace('url = "file:///mnt/home"', "")
    plan.path.write_text(text)
    bare = deployment_file.load(plan.path)
    mover = mover_of(bare, PRICES, progress(8), lambda _: None)
    assert mover.moved(bare, [], 11.9 * HOUR) == bare


def without(plan: DeploymentPlan, old: str, new: str) -> DeploymentPlan:
    plan.path.write_text(plan.path.read_text().replace(old, new))
    return deployment_file.load(plan.path)


NO_SPOT = replace(PRICES, machines=(replace(PRICES.machines[0], spot=None),))


def test_a_deadline_without_a_price_is_refused_before_the_start(plan: DeploymentPlan):
    """In the middle of a run, it would end the watch, and machines went on unkept."""
    with pytest.raises(JobError, match=r"price of a spot g5\.xlarge") as caught:
        check_prices(plan, NO_SPOT)
    assert caught.value.key == "sites[0].dollars_per_hour"
    check_prices(plan, PRICES)
    stated = without(
        plan, 'provider = "aws"', 'provider = "aws"\ndollars_per_hour = 0.2'
    )
    check_prices(stated, NO_SPOT)
    with pytest.raises(JobError, match="price of an on-demand") as caught:
        check_prices(stated, replace(PRICES, machines=()))
    assert caught.value.key == "sites[0].on_demand_dollars_per_hour"


def test_a_damaged_record_is_refused_before_the_start(plan: DeploymentPlan):
    """And not when the machines have been started."""
    clock, told = VirtualClock(1.782e9), list[str]()
    (plan.folder / "sightings.json").write_text('{"sightings": [')
    with pytest.raises(CorruptObject, match=r"sightings\.json is damaged.*delete it"):
        check_moves(plan, clock, told.append)
    (plan.folder / "sightings.json").unlink()
    check_moves(plan, clock, told.append)


def test_a_deadline_that_moves_no_site_is_told(plan: DeploymentPlan):
    """Instead of old prices, on which nothing depends."""
    told: list[str] = []
    check_moves(without(plan, '"spot"', '"on-demand"'), VirtualClock(3e9), told.append)
    (line,) = told
    assert line.startswith("deadline_hours changes nothing: no site is on a spot")


def test_old_prices_are_told_only_if_a_deadline_depends_on_them(plan: DeploymentPlan):
    told: list[str] = []
    check_moves(plan, VirtualClock(3e9), told.append)
    assert [line[:14] for line in told] == ["the prices in "]
    both = 'provider = "aws"\ndollars_per_hour = 0.2\non_demand_dollars_per_hour = 1.0'
    check_moves(without(plan, 'provider = "aws"', both), VirtualClock(3e9), told.append)
    assert len(told) == 1


def test_a_stated_price_is_that_of_the_stated_market(plan: DeploymentPlan):
    """And a machine that was moved is counted at the other one."""
    stated = without(
        plan,
        'provider = "aws"',
        'provider = "aws"\ndollars_per_hour = 0.2\non_demand_dollars_per_hour = 1.5',
    )
    told: list[str] = []
    mover = mover_of(stated, replace(PRICES, machines=()), progress(8), told.append)
    now = (12 - 8 - BOOT_HOURS - 0.1) * HOUR
    moved = mover.moved(stated, [node(state=NodeState.GONE)], now)
    assert "at $1.500 an hour" in told[0]
    assert moved.file.sites[0].dollars_per_hour == 1.5
    assert stated.file.sites[0].in_market("spot").dollars_per_hour == 0.2


def test_attached_gpus_are_not_forgotten_in_a_price(plan: DeploymentPlan):
    """The type alone costs a fraction."""
    site = plan.file.sites[0]
    machine = replace(site.machine, accelerator="nvidia-tesla-t4", accelerators=2)
    with pytest.raises(JobError, match=r"a spot g5\.xlarge \+ 2 x nvidia-tesla-t4"):
        spending._hourly(
            replace(plan.file, sites=(replace(site, machine=machine),)), PRICES
        )


def test_a_move_waits_for_the_end_of_the_round_while_the_deadline_allows(
    plan: DeploymentPlan,
):
    """It may if a loss just before that end could still be made up for."""
    began = 3 * HOUR
    for spare, waits in ((1.1, True), (0.9, False)):
        now = began + 0.1 * HOUR
        left = 8.0 - 0.1 + BOOT_HOURS + spare
        known = WorkLeft(
            started=now - (12.0 - left) * HOUR,
            rounds_left=8,
            round_seconds=HOUR,
            round_began=began,
        )
        mover = mover_of(plan, PRICES, lambda known=known: known, lambda _: None)
        alive = [node(launched=0.0)]
        moved = mover.moved(plan, alive, now)
        assert markets(moved) == ["on-demand", "on-demand"]
        assert mover.may_wait(plan, moved, alive, now) is waits
        # A machine that is gone waits for nothing.
        assert not mover.may_wait(plan, moved, [], now)


def test_a_machine_stays_while_a_lost_round_could_be_made_up_for(plan: DeploymentPlan):
    """A loss costs the round that it happens in, besides the start of the next one."""
    mover = mover_of(plan, PRICES, progress(8), lambda _: None)
    at = (12 - 8 - BOOT_HOURS) * HOUR
    assert mover.moved(plan, [node()], at - 1.3 * HOUR) == plan
    mover.reconsider()
    late = mover.moved(plan, [node()], at - 1.2 * HOUR)
    assert markets(late) == ["on-demand", "on-demand"]


class Published:
    """A cloud that publishes prices of two zones."""

    def __init__(self) -> None:
        self.dollars = {"us-east-1a": 0.3, "us-east-1b": 0.2}
        self.fails = False

    def spot_prices(
        self, machine: str, zones: Sequence[str], since: float
    ) -> Sequence[SpotPrice]:
        assert machine == "g5.xlarge"
        if self.fails:
            raise ComputeUnavailable("no route to the service")
        return [
            SpotPrice(zone=zone, at=since, dollars_per_hour=self.dollars[zone])
            for zone in zones
        ]


@pytest.fixture
def zoned(plan: DeploymentPlan) -> DeploymentPlan:
    zones = 'type = "g5.xlarge"\nzones = ["us-east-1a", "us-east-1b"]'
    return without(plan, 'type = "g5.xlarge"', zones)


def zones(plan: DeploymentPlan) -> Sequence[str]:
    return plan.file.sites[0].machine.zones


def test_a_lost_machine_is_replaced_in_the_zone_that_costs_least(zoned: DeploymentPlan):
    """By the prices that the cloud publishes; not where it has just been lost."""
    market = Published()
    mover = mover_of(zoned, PRICES, progress(2), print, market)
    assert mover.moved(zoned, [node(zone="us-east-1b")], HOUR) == zoned
    gone = node(zone="us-east-1b", state=NodeState.GONE)
    found = mover.moved(zoned, [gone], HOUR + 60.0)
    assert zones(found) == ("us-east-1a", "us-east-1b")
    # After a while, it is tried there again; also by the next command.
    again = mover_of(zoned, PRICES, progress(2), print, market)
    found = again.moved(zoned, [], 4 * HOUR)
    assert zones(found) == ("us-east-1b", "us-east-1a")


def test_a_refusal_of_all_zones_is_no_machine_for_a_while(zoned: DeploymentPlan):
    """Then a machine on demand costs less than to wait, if there is little time."""
    told: list[str] = []
    mover = mover_of(zoned, PRICES, progress(8), told.append, Published())
    now = 1.5 * HOUR
    assert markets(mover.moved(zoned, [], now)) == ["spot", "on-demand"]
    mover.note_refused(zoned, {"site-cloud"}, now)
    mover.moved(zoned, [], now + 1.0)
    sightings = json.loads((zoned.folder / "sightings.json").read_text())["sightings"]
    assert [each["seen"]["has_capacity"] for each in sightings] == [False, False]


def test_a_cloud_that_does_not_answer_is_named_once(zoned: DeploymentPlan):
    told: list[str] = []
    market = Published()
    market.fails = True
    mover = mover_of(zoned, PRICES, progress(2), told.append, market)
    for number in range(3):
        mover.reconsider()
        mover.moved(zoned, [], HOUR * (1 + number))
    assert told == ["no route to the service; the price table counts until it answers"]


def test_a_machine_that_was_to_be_replaced_was_not_lost(zoned: DeploymentPlan):
    """It would count against its zone for a week."""
    mover = mover_of(zoned, PRICES, progress(2), print, Published())
    mover.moved(zoned, [node(zone="us-east-1a")], HOUR)
    moved = replace(
        zoned,
        file=replace(
            zoned.file,
            sites=tuple(
                replace(s, machine=replace(s.machine, market="on-demand"))
                for s in zoned.file.sites
            ),
        ),
    )
    mover.moved(moved, [], HOUR + 60.0)
    record = SpotRecord(zoned.folder, {}, print)
    launched, left = record.sightings(zoned.file.sites[0])
    assert (launched.zone, launched.is_given_up) == ("us-east-1a", False)
    assert (left.has_capacity, left.is_given_up) == (True, True)


@pytest.mark.parametrize(
    ("ended", "seen"), [(False, [True, False]), (True, [True, True])]
)
def test_a_machine_that_ends_itself_says_nothing_about_its_zone(
    plan: DeploymentPlan, *, ended: bool, seen: list[bool]
):
    """Its site could not start; the zone had a machine to give."""
    mover = mover_of(plan, PRICES, progress(8), lambda _: None)
    running = node(zone="us-east-1a")
    mover.moved(plan, [running], HOUR)
    gone = replace(running, state=NodeState.GONE, failed=ended)
    mover.moved(plan, [gone], HOUR + 60.0)
    known = SpotRecord(plan.folder, {}, lambda _: None).sightings(plan.file.sites[0])
    assert [each.has_capacity for each in known] == seen
    assert known[-1].is_given_up is ended


class Changing(Published):
    """A cloud in which a zone has cost something else until an hour ago."""

    def __init__(self, before: dict[str, float], now: float) -> None:
        super().__init__()
        self.before, self.at = before, now - HOUR

    def spot_prices(
        self, machine: str, zones: Sequence[str], since: float
    ) -> Sequence[SpotPrice]:
        assert machine == "g5.xlarge"
        return [
            SpotPrice(zone=zone, at=at, dollars_per_hour=dollars[zone])
            for at, dollars in ((since, self.before), (self.at, self.dollars))
            for zone in zones
        ]


def test_a_machine_that_works_moves_to_a_zone_that_costs_less(zoned: DeploymentPlan):
    """After its round; the one that it leaves is named, and ends after the launch."""
    told: list[str] = []
    market = Published()
    mover = mover_of(zoned, PRICES, progress(7), told.append, market)
    here = node(zone="us-east-1a")
    market.dollars = {"us-east-1a": 0.3, "us-east-1b": 0.28}
    assert mover.moved(zoned, [here], HOUR) == zoned
    assert not mover.leaving(zoned, [here])
    market.dollars["us-east-1b"] = 0.1
    again = mover_of(zoned, PRICES, progress(7), told.append, market)
    found = again.moved(zoned, [here], HOUR)
    assert zones(found) == ("us-east-1b",)
    assert again.may_wait(zoned, found, [here], HOUR)
    assert again.leaving(found, [here]) == {here.id}
    (line,) = told
    assert "site-cloud: move: aws us-east-1b g5.xlarge spot at $0.100" in line
    # Where it is then, it stays; if it is lost, all zones count again.
    there = node(id="i-2", zone="us-east-1b", launched=HOUR)
    assert again.moved(found, [there], HOUR + 1.0) == found
    assert not again.leaving(found, [there])
    seen = SpotRecord(zoned.folder, {}, print).sightings(zoned.file.sites[0])
    assert (seen[-2].zone, seen[-1].zone) == ("us-east-1b", "us-east-1a")
    assert (seen[-1].has_capacity, seen[-1].is_given_up) == (True, True)
    lost = again.moved(found, [], HOUR + 2.0)
    seen = SpotRecord(zoned.folder, {}, print).sightings(zoned.file.sites[0])
    assert (seen[-1].zone, seen[-1].has_capacity) == ("us-east-1b", False)
    assert zones(lost) == ("us-east-1a", "us-east-1b")


def test_a_move_to_a_cheaper_zone_can_always_wait_for_its_round(zoned: DeploymentPlan):
    """Where the deadline is near, the machine stays or moves to one on demand."""
    market = Published()
    market.dollars["us-east-1b"] = 0.05
    here = [node(zone="us-east-1a")]
    found = {}
    for spare in (0.9, 1.2, 1.4, 1.6):
        now = (12.0 - 7.0 - BOOT_HOURS - spare) * HOUR
        mover = mover_of(zoned, PRICES, progress(7), print, market)
        after = mover.moved(zoned, here, now)
        is_move = zones(after) == ("us-east-1b",)
        assert not is_move or mover.may_wait(zoned, after, here, now)
        found[spare] = "move" if is_move else markets(after)[0]
    assert found == {0.9: "on-demand", 1.2: "on-demand", 1.4: "spot", 1.6: "move"}


def test_a_zone_that_has_refused_a_move_is_not_asked_again_soon(zoned: DeploymentPlan):
    told: list[str] = []
    market = Published()
    market.dollars["us-east-1b"] = 0.1
    mover = mover_of(zoned, PRICES, progress(7), told.append, market)
    here = node(zone="us-east-1a")
    found = mover.moved(zoned, [here], HOUR)
    mover.note_refused(found, {"site-cloud"}, HOUR + 1.0)
    mover.reconsider()
    assert mover.moved(zoned, [here], HOUR + 2.0) == zoned
    # Decided again by itself when a slot is over; prices were read again by then.
    assert mover.moved(zoned, [here], HOUR * (1.1 + BOOT_HOURS)) == found
    assert len(told) == 2


def test_a_lost_machine_waits_for_a_price_that_is_likely(zoned: DeploymentPlan):
    """Unless the machines of others cost more meanwhile."""
    told: list[str] = []
    usual = {"us-east-1a": 0.2, "us-east-1b": 0.2}
    market = Changing(usual, HOUR)
    market.dollars = {"us-east-1a": 0.9, "us-east-1b": 0.9}
    mover = mover_of(zoned, PRICES, progress(2), told.append, market)
    assert mover.moved(zoned, [], HOUR) == zoned
    assert mover.waiting == {"site-cloud"}
    assert "site-cloud: wait: a lower price" in told[0]
    mover.moved(zoned, [], HOUR * (1.1 + BOOT_HOURS))
    assert len(told) == 1
    busy = without(zoned, 'name = "here"', 'name = "here"\ndollars_per_hour = 9.0')
    mover = mover_of(busy, PRICES, progress(2), told.append, market)
    mover.moved(busy, [], HOUR)
    assert not mover.waiting


def test_a_clock_that_is_set_back_does_not_prolong_a_wait(zoned: DeploymentPlan):
    """The price has fallen meanwhile, and is read again."""
    market = Changing({"us-east-1a": 0.2, "us-east-1b": 0.2}, HOUR)
    market.dollars = {"us-east-1a": 0.9, "us-east-1b": 0.9}
    mover = mover_of(zoned, PRICES, progress(2), print, market)
    mover.moved(zoned, [], 5 * HOUR)
    assert mover.waiting == {"site-cloud"}
    market.dollars = {"us-east-1a": 0.05, "us-east-1b": 0.04}
    found = mover.moved(zoned, [], 2 * HOUR)
    assert not mover.waiting
    assert zones(found) == ("us-east-1b", "us-east-1a")


def test_a_machine_that_ended_between_two_commands_did_not_run_on(
    zoned: DeploymentPlan,
):
    """`crossfed down` for a night would look like capacity of that zone."""
    site, a, b = zoned.file.sites[0], "us-east-1a", "us-east-1b"
    first = mover_of(zoned, PRICES, progress(2), print)
    here = [node(zone=a), node(id="i-2", zone=b, labels={"crossfed-role": "other"})]
    first.moved(zoned, here[:1], HOUR)
    SpotRecord(zoned.folder, {}, print).note(
        site, Sighting(zone=b, at=2 * HOUR, has_capacity=False)
    )
    again = mover_of(zoned, PRICES, progress(2), print)
    again.moved(zoned, here, 2 * HOUR)  # It is still there.
    seen = SpotRecord(zoned.folder, {}, print).sightings(site)
    assert not any(each.is_given_up for each in seen)
    later = mover_of(zoned, PRICES, progress(2), print)
    later.moved(zoned, [node(id="i-3", zone=a, launched=9 * HOUR)], 9.5 * HOUR)
    *_, ended, new = SpotRecord(zoned.folder, {}, print).sightings(site)
    assert (ended.zone, ended.at, ended.is_given_up) == (a, 2 * HOUR, True)
    assert (new.zone, new.at, new.is_given_up) == (a, 9.5 * HOUR, False)


def test_the_next_run_knows_how_long_machines_had_lasted(zoned: DeploymentPlan):
    """Nothing is known of their zones between the two runs."""
    mover = mover_of(zoned, PRICES, progress(2), print)
    here = [
        node(zone="us-east-1a"),
        node(id="i-2", labels={"crossfed-role": "site-here"}),
        node(Market.ON_DEMAND, id="i-3"),
    ]
    mover.moved(zoned, here, HOUR)
    mover.note_ended(5 * HOUR)
    mover.note_ended(6 * HOUR)  # By then they are gone.
    again = mover_of(zoned, PRICES, progress(2), print)
    again.moved(zoned, [], 30 * HOUR)
    record = SpotRecord(zoned.folder, {}, print)
    launched, ended = record.sightings(zoned.file.sites[0])
    assert (launched.at, launched.is_given_up) == (HOUR, False)
    assert (ended.zone, ended.at) == ("us-east-1a", 5 * HOUR)
    assert (ended.has_capacity, ended.is_given_up) == (True, True)
