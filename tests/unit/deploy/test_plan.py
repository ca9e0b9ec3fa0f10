"""What a deployment's run will send, take and cost, and what else one could do."""

import tomllib
from argparse import Namespace
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import pytest
import tomli_w
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.cli import job_check, terminal
from deploy.fleet import forecast, plan, plan_prices, preflight, prices
from deploy.fleet.machine_spec import CloudMachine, SiteMachine
from deploy.fleet.spec import DeploymentFile, StartSpec
from deploy.wiring import parts
from federation.clock import VirtualClock
from federation.errors import JobError, StoreUnavailable
from federation.events import Event
from federation.job.spec import JobSpec
from federation.rounds import cost
from federation.rounds.local_work import in_round
from federation.rounds.traffic import examples_trained
from monitoring.views.run_fold import fold

SECURE = {"privacy": {"secure_aggregation": {"enabled": True, "max_examples": 1000}}}


SIZES = partial(job_check.sizes_of, clock=VirtualClock(0.0))


def virtual_job(**changes: object) -> JobSpec:
    """Two sites of known speeds, and lines that take no time."""
    machines = [
        {"site": site.name, "examples_per_second": 100.0 * (1 + index)}
        for index, site in enumerate(small_job(num_sites=2).sites)
    ]
    tables = {"simulation": {"machines": machines}, "rounds": 4}
    return small_job(num_sites=2, **{**tables, **changes})


def view_of(job: JobSpec):
    seen: list[Event] = []
    simulate(job, engine="virtual", listeners=[seen.append])
    return fold(seen)


def test_speeds_of_a_run_are_those_that_its_machines_had():
    """Virtual time has no noise: the job's own speeds come back."""
    job = virtual_job()
    federation = parts.build_federation(job)
    traffic = SIZES(federation)
    assert traffic is not None
    view = view_of(job)
    speeds = forecast.measured_speeds(view, traffic)
    for speed, machine in zip(speeds.sites, job.simulation.machines, strict=True):
        stated = pytest.approx(machine.examples_per_second, rel=0.01)
        assert speed.name == machine.site
        assert speed.train_examples_per_second == stated
        assert speed.evaluate_examples_per_second == stated
    assert view.finished is not None
    predicted = cost.of_run(traffic, speeds).seconds
    assert predicted == pytest.approx(view.finished.seconds, rel=0.02)


@pytest.mark.parametrize("secure", [{}, {"enabled": True, "two_sites_waiver": True}])
def test_speeds_of_a_run_by_capacity_are_those_of_other_work(secure: dict[str, bool]):
    """Also if sites do not say how many steps they took: the aggregator gave them."""
    tables = {"evaluation": {"every": 0}, "privacy": {"secure_aggregation": secure}}
    tables |= {"training": {"local_steps": 8}, "schedule": {"allocation": "capacity"}}
    job = virtual_job(rounds=8, **tables)
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    speeds = forecast.measured_speeds(view_of(job), traffic)
    for speed, machine in zip(speeds.sites, job.simulation.machines, strict=True):
        stated = pytest.approx(machine.examples_per_second, rel=0.05)
        assert speed.train_examples_per_second == stated


def test_a_run_of_one_round_tells_no_speeds():
    """Its only round has work that no other has."""
    job = virtual_job(rounds=1)
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    with pytest.raises(JobError, match="two rounds or more") as caught:
        forecast.measured_speeds(view_of(job), traffic)
    assert caught.value.key == "--like"


def test_alternatives_are_predicted_as_jobs_of_their_own():
    """Each with its keys set; the job itself comes first."""
    job = virtual_job()
    federation = parts.build_federation(job)
    speeds = cost.machine_speeds(job.simulation.machines)
    first, *others = plan.alternatives(federation, speeds, SIZES)
    assert (first.name, dict(first.changes)) == ("as it is", {})
    found = {one.name: one for one in others}
    assert set(found) == {
        "updates in bf16",
        "both directions in 16 bits",
        "twice the local steps, half the rounds",
        "no evaluation until the end",
    }
    for one in others:
        changed = plan.changed(job, one.changes)
        alone = SIZES(parts.build_federation(changed))
        assert alone is not None
        assert one.traffic.of_run() == alone.of_run()
        assert one.cost == cost.of_run(alone, speeds)
        assert one.num_bytes < first.num_bytes
    assert found["twice the local steps, half the rounds"].changes == {
        "rounds": 2,
        "training.local_steps": 2 * (job.training.local_steps or 0),
    }


def test_half_the_rounds_train_on_as_many_examples():
    """Steps grow after as many of them; not within a round, which no job allows."""
    growing = {"local_steps": 2, "batch_size": 4, "accumulate_from": [[3, 4]]}
    job = virtual_job(training=growing)
    federation = parts.build_federation(job)
    first, *others = plan.alternatives(federation, None, SIZES)
    (half,) = (one for one in others if "rounds" in one.changes)
    assert half.changes["training.accumulate_from"] == [[2, 4]]

    def examples(one: plan.Alternative) -> int:
        return sum(
            times * examples_trained(in_round(one.traffic.job, index).training, facts)
            for index, times in one.traffic.kinds_of_round().items()
            if index <= one.traffic.job.rounds
            for facts in one.traffic.facts.values()
        )

    assert examples(half) == examples(first) == 2 * 2 * 4 * (2 + 2 * 4)
    within = virtual_job(training={**growing, "accumulate_from": [[2, 4]]})
    found = plan.alternatives(parts.build_federation(within), None, SIZES)
    assert not any("rounds" in one.changes for one in found)


TABLE = prices.load(None, today=date(2026, 6, 20), warn=pytest.fail)


def test_prices_are_those_of_the_deployment():
    """Machines for the time, traffic at its source."""
    job = virtual_job()
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    name = job.sites[0].name
    site = SiteMachine(name=name, dollars_per_hour=3600.0, dollars_per_gigabyte=1e9)
    file = DeploymentFile(name="x", job="j", sites=(site,))
    speeds = cost.machine_speeds(job.simulation.machines)
    speeds = plan_prices.with_prices(speeds, file, TABLE, traffic=traffic)
    found = cost.of_run(traffic, speeds)
    _, up = traffic.of_run()
    assert found.dollars["machines"] == pytest.approx(found.seconds)
    assert 0 < found.dollars["traffic up"] < up.high  # That of one of two sites.
    assert found.dollars["traffic down"] == 0


def cloud(provider: str, region: str, kind: str, **changes: object) -> SiteMachine:
    machine = CloudMachine(region=region, type=kind, **changes)  # type: ignore[arg-type]
    return SiteMachine(name="site-0", provider=provider, machine=machine)


def test_machines_of_clouds_cost_what_the_table_says():
    """By the hour and market, and by the gigabyte that leaves the cloud."""
    job = virtual_job()
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    known = cost.machine_speeds(job.simulation.machines)
    site = cloud("gcp", "us-central1", "a2-highgpu-1g", market="spot")
    file = DeploymentFile(name="x", job="j", sites=(site,))
    priced = plan_prices.with_prices(known, file, TABLE, traffic=traffic)
    disk = 50 * 0.04 / 730 + 0.0064  # And the gateway.
    assert priced.sites[0].dollars_per_hour == pytest.approx(1.804 + disk)
    assert priced.sites[0].dollars_per_gigabyte == pytest.approx(0.12 + 0.045)
    assert priced.sites[1].dollars_per_hour == 0
    own = plan._predict("as it is", {}, traffic, priced)
    ways = plan_prices.ways_to_rent(own, known, file, TABLE, plan_prices.PriceTerms())
    found = {way.name: way for way in ways}
    assert set(found) == {"all on demand", "aggregator in gcp us-central1"}
    other = found["all on demand"]
    terms = plan_prices.PriceTerms(spot=False)
    demand = plan_prices.with_prices(known, file, TABLE, traffic=traffic, terms=terms)
    assert other.cost == cost.of_run(traffic, demand)
    # Beside the aggregator, what leaves the site only changes its zone.
    near = found["aggregator in gcp us-central1"].cost
    assert near is not None
    assert near.dollars["traffic up"] == pytest.approx(
        cost.of_run(traffic, priced).dollars["traffic up"] * 0.01 / 0.165
    )
    assert own.cost is not None
    assert other.cost is not None
    ratio = other.cost.dollars["machines"] / own.cost.dollars["machines"]
    assert ratio == pytest.approx((3.673 + disk) / (1.804 + disk))
    site = cloud("aws", "mars-1", "g5.xlarge")
    file = DeploymentFile(name="x", job="j", sites=(site,))
    with pytest.raises(
        JobError, match=r"g5.xlarge of aws in 'mars-1' \(it has us-east"
    ):
        plan_prices.with_prices(known, file, TABLE, traffic=traffic)


def test_a_gateway_a_disk_and_the_installation_are_part_of_the_price():
    """A terabyte each way at two sites costs 390 dollars, and not 210."""
    job = virtual_job()
    traffic = SIZES(parts.build_federation(job))
    assert traffic is not None
    clouds = [
        cloud("aws", "us-east-1", "m7i.large", disk_gb=730),
        replace(cloud("gcp", "us-central1", "e2-standard-4"), name="site-1"),
    ]
    file = DeploymentFile(
        name="x", job="j", sites=tuple(clouds), start=StartSpec(machine_minutes=30.0)
    )
    known = cost.machine_speeds(job.simulation.machines)
    priced = plan_prices.with_prices(known, file, TABLE, traffic=traffic)
    terabytes = dict.fromkeys(("site-0", "site-1"), (10**12, 10**12))
    found = cost.dollars(1800.0, terabytes, priced)
    assert found["traffic up"] == pytest.approx(90 + 120 + 90)
    assert found["traffic down"] == pytest.approx(90)
    gateways = 0.05 + 0.0064
    hourly = 0.1008 + 0.08 + 0.13402 + 50 * 0.04 / 730 + gateways
    assert found["machines"] == pytest.approx(hourly)  # Half an hour of each hour.
    # What is stated is the whole price, and inside of a cloud there is no gateway.
    stated = replace(clouds[0], dollars_per_hour=1.0, dollars_per_gigabyte=0.5)
    near = plan_prices.with_prices(
        known,
        replace(file, sites=(stated, clouds[1])),
        TABLE,
        traffic=traffic,
        terms=plan_prices.PriceTerms(aggregator=("gcp", "us-central1")),
    )
    assert [
        (site.dollars_per_gigabyte, site.dollars_per_gigabyte_received)
        for site in near.sites[:2]
    ] == [(0.5, 0.0), (0.01, 0.0)]
    missing: list[str] = []
    old = replace(TABLE, transfer=(), storage=())
    priced = plan_prices.with_prices(known, file, old, traffic=traffic, missing=missing)
    assert not cost.of_run(traffic, priced).is_known
    assert len(missing) == 4
    assert "no through_nat of 'aws'" in missing[1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("spot = 1.804", "spot = 18.04", r"machines\[5\].spot: 18.04 is more than"),
        ("on_demand = 55.04", "on_demand = 5504", r"machines\[0\].on_demand"),
        ("dollars = 0.09", "dollars = 9", r"egress\[0\].tiers\[1\].dollars"),
        ("up_to = 10_240.0, dollars = 0.09", "up_to = 1, dollars = 0.09", "must rise"),
        ("{ dollars = 0.05 }", "{ up_to = 9e9, dollars = 0.05 }", "must rise"),
        ('as_of = "2026-06-17"', 'as_of = "June"', "as_of: 'June' is not a day"),
    ],
)
def test_slips_in_a_price_table_are_named(
    tmp_path: Path, old: str, new: str, message: str
):
    """A decimal point in the wrong place would make a plan worthless."""
    text = prices.PACKAGED.read_text()
    assert old in text
    path = tmp_path / "prices.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(JobError, match=message):
        prices.load(path, today=date(2026, 6, 20), warn=print)


@pytest.mark.parametrize(
    ("gigabytes", "before", "dollars"),
    [
        (10.0, None, 0.09),  # Nobody knows the month: nothing is free.
        (10.0, 0.0, 0.0),
        (200.0, 0.0, 0.09 / 2),
        (10.0, 95.0, 0.09 / 2),
        (20_280.0, None, (10_140 * 0.09 + 10_140 * 0.085) / 20_280),
        (100.0, 200_000.0, 0.05),
        (0.0, None, 0.09),
    ],
)
def test_traffic_goes_through_a_month_s_tiers(
    gigabytes: float, before: float | None, dollars: float
):
    """As it would on a bill, on top of what has left before."""
    found = TABLE.per_gigabyte("aws", gigabytes, before=before)
    assert found == pytest.approx(dollars)


def test_few_secret_sites_are_told_what_a_leave_costs():
    """More can spare one."""
    for num_sites, is_told in ((3, True), (4, False)):
        job = small_job(num_sites=num_sites, **SECURE)
        assert bool([*preflight.notices(job)]) == is_told
    assert not [*preflight.notices(small_job(num_sites=2))]


def test_what_stays_in_a_bucket_costs_by_the_month():
    """The model and the checkpoints that are kept; nothing on this machine."""
    job = small_job(num_sites=2, storage={"url": "s3://bucket/runs"})
    federation = parts.build_federation(job)
    own = plan._predict("as it is", {}, SIZES(federation), None)
    found = plan_prices.storage(own, TABLE)
    model = 4 * federation.pool.layout.size
    assert found == {
        "bytes": 4 * model,
        "dollars_per_month": pytest.approx(4 * model / 1e9 * 0.023),
    }
    here = plan._predict("here", {}, SIZES(parts.build_federation(small_job())), None)
    assert plan_prices.storage(here, TABLE) is None


@pytest.mark.slow
def test_a_plan_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As SVG or PNG; another ending is refused, and an error shows no one's code."""
    from monitoring.pages import plots  # noqa: PLC0415 (imports matplotlib)

    points = {"as it is": (10.0, 2.0), "half": (5.0, 3.0)}
    for name, head in (("p.svg", b"<?xml"), ("p.png", b"\x89PNG")):
        plots.write_plan(points, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(head)
    with pytest.raises(JobError, match=r"must end in .svg or .png"):
        plots.write_plan(points, tmp_path / "p.jpg")
    for name in ("no folder/p.svg", "no folder/p.png"):
        with pytest.raises(
            StoreUnavailable, match=r"no folder/p\..*name another"
        ) as no:
            plots.write_plan(points, tmp_path / name)
        assert terminal.complain(no.value, Namespace(verbose=False)) == 1
        assert "site-packages" not in capsys.readouterr().err


def test_prices_of_a_day_to_come_are_not_new(tmp_path: Path):
    """Nobody knows their age: a slip, or a clock that is behind."""
    text = prices.PACKAGED.read_text()
    one = text.replace('gpu = "H100"', 'as_of = "2027-06-17"', 1)
    path = tmp_path / "prices.toml"
    for slip in (text.replace("2026-", "2027-"), one):
        path.write_text(slip)
        told: list[str] = []
        prices.load(path, today=date(2026, 6, 20), warn=told.append)
        assert len(told) == 1
        assert "2027-06-17" in told[0]
    # East of Greenwich a table may be of the day that begins there first.
    prices.load(None, today=date(2026, 6, 16), warn=pytest.fail)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("machines", 'region = "us-east4"\nmachine = "a3-highgpu-8g"\non_demand = 8'),
        ("egress", "tiers = [{ dollars = 0.01 }]"),
        ("transfer", "between_zones = 0.01\nbetween_regions = 0.01"),
        ("storage", "per_gigabyte_month = 0.01"),
        ("keys", "per_month = 0.1"),
    ],
)
def test_a_second_price_of_the_same_is_refused(tmp_path: Path, name: str, row: str):
    """Or the first would count, and a correction below it would not be noticed."""
    table = tomllib.loads(prices.PACKAGED.read_text())
    table[name].append({"provider": "gcp"} | tomllib.loads(row))
    path = tmp_path / "prices.toml"
    path.write_text(tomli_w.dumps(table))
    last = len(table[name]) - 1
    message = rf"{name}\[{last}\]: gcp.* {name}\[{last - 1}\] already"
    with pytest.raises(JobError, match=message):
        prices.load(path, today=date(2026, 6, 20), warn=print)


def test_a_bucket_is_part_of_what_a_run_costs():
    """Its requests and what it keeps meanwhile, for every way that is compared."""
    tables = {
        "storage": {"url": "s3://bucket/runs"},
        "aggregation": {"server_optimizer": {"name": "adam", "lr": 0.1}},
    }
    job = virtual_job(**tables)
    speeds = cost.machine_speeds(job.simulation.machines)
    own, *others = plan.alternatives(parts.build_federation(job), speeds, SIZES)
    found = plan_prices.with_bucket(own, TABLE)
    assert own.cost is not None
    assert found.cost is not None
    # 5 checkpoints of model, optimiser, manifest and events; 4 + 3 x 4 lists; 2 of the
    # checkpoints go, each with two blobs that are looked at first.
    assert found.cost.dollars["requests"] == pytest.approx(
        (5 * 4 + 16) * 0.005 / 1000 + 2 * 2 * 0.0004 / 1000
    )
    kept = plan_prices.storage(own, TABLE, speeds)
    assert kept is not None
    month = kept["dollars_per_month"]
    assert found.cost.dollars["storage"] == pytest.approx(
        month * own.cost.seconds / (730 * 3600)
    )
    assert found.cost.total > own.cost.total
    fastest = max(site.down_bytes_per_second for site in speeds.sites)
    assert kept["access_seconds"] == pytest.approx(kept["bytes"] / fastest)
    assert kept["dollars_per_month_and_second"] == pytest.approx(
        month / kept["access_seconds"]
    )
    half = next(x for x in others if x.name.startswith("twice the local"))
    less = plan_prices.with_bucket(half, TABLE).cost
    assert less is not None
    assert less.dollars["requests"] < found.cost.dollars["requests"]
    here = plan.alternatives(parts.build_federation(virtual_job()), speeds, SIZES)[0]
    assert plan_prices.with_bucket(here, TABLE) == here
    unknown = plan_prices.with_bucket(own, replace(TABLE, storage=())).cost
    assert unknown is not None
    assert not unknown.is_known
