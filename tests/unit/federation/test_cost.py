"""How much of its time a site trains, by the model of time."""

from dataclasses import replace
from typing import Any

import pytest
from support.small_jobs import small_job
from support.toy import LAYOUT

from federation.ids import SiteId
from federation.rounds import cost
from federation.rounds.cost import SiteSpeed, Speeds
from federation.rounds.traffic import SiteFacts, Traffic
from federation.wire.relayed import up_sizes

SITES = 3


def traffic_of(**training: Any) -> Traffic:
    job = small_job(
        num_sites=SITES,
        rounds=4,
        evaluation={"every": 0},
        training={"batch_size": 10, "optimizer": {"lr": 0.1}, **training},
    )
    names = [SiteId(site.name) for site in job.sites]
    return Traffic(job=job, layout=LAYOUT, facts=dict.fromkeys(names, SiteFacts(50, 5)))


def speeds_of(traffic: Traffic, *, seconds: float) -> Speeds:
    """A step takes 1 s, and a message each way as long as is said."""
    (leg,) = traffic.legs(SiteId(traffic.job.sites[0].name), 2)
    return Speeds(
        sites=tuple(
            SiteSpeed(
                name=site.name,
                train_examples_per_second=10.0,
                evaluate_examples_per_second=10.0,
                down_bytes_per_second=leg.down.high / seconds,
                up_bytes_per_second=leg.up.high / seconds,
            )
            for site in traffic.job.sites
        )
    )


def test_sites_train_for_what_messages_leave():
    """Six seconds of steps beside two of messages."""
    traffic = traffic_of(local_steps=6)
    share = cost.trained_share(traffic, speeds_of(traffic, seconds=1.0))
    assert share == pytest.approx(6 / 8, rel=1e-3)


@pytest.mark.parametrize(("ahead", "expected"), [(1, 6 / 7), (2, 1.0), (5, 1.0)])
def test_steps_ahead_hide_messages(ahead: int, expected: float):
    """As many seconds as they take, and no more than there are."""
    traffic = traffic_of(local_steps=6, overlap_steps=ahead)
    share = cost.trained_share(traffic, speeds_of(traffic, seconds=1.0))
    assert share == pytest.approx(expected, rel=1e-3)


def test_enough_steps_are_the_fewest():
    """97 % of a round are 65 of its 67 seconds, and messages tell their number."""
    traffic = traffic_of(local_steps=6)
    speeds = speeds_of(traffic, seconds=1.0)
    steps = cost.steps_for_share(traffic, speeds, 0.97)
    assert steps is not None
    assert 65 <= steps < 70

    def share_of(number: int) -> float:
        training = replace(traffic.job.training, local_steps=number)
        job = replace(traffic.job, training=training)
        return cost.trained_share(replace(traffic, job=job), speeds) or 0.0

    assert share_of(steps) >= 0.97 > share_of(steps - 1)


def test_messages_of_a_relay_are_measured_once(monkeypatch: pytest.MonkeyPatch):
    """And not for each of its sites, which takes the square of their number."""
    measured: list[int] = []

    def counted(through: Any, answers: Any) -> list[int]:
        measured.append(len(answers))
        return up_sizes(through, answers)

    monkeypatch.setattr("federation.rounds.traffic.up_sizes", counted)
    names = [f"site-{number}" for number in range(SITES)]
    relays = [{"name": "relay", "sites": names[:2]}]
    job = small_job(num_sites=SITES, schedule={"minimum_sites": 1}, relays=relays)
    facts = {SiteId(name): SiteFacts(50, 5) for name in names}
    traffic = Traffic(job=job, layout=LAYOUT, facts=facts)
    first, second, _ = (traffic.legs(SiteId(name), 1)[0] for name in names)
    assert 0 <= first.up.high - second.up.high <= 1
    assert measured == [2, 2]  # The smallest answers and the largest.


@pytest.mark.parametrize(
    "schedule",
    [
        {"mode": "buffered", "buffer_size": 1},
        {"mode": "buffered", "buffer_size": 2},
        {"sites_per_round": 2, "minimum_sites": 1},
        {},
    ],
)
@pytest.mark.parametrize("every", [0, 1])
def test_bytes_of_sites_add_up_to_those_of_the_run(
    schedule: dict[str, Any], every: int
):
    """Not as if each site had a part in each model or round."""
    evaluation = {"every": every}
    job = small_job(num_sites=SITES, rounds=9, schedule=schedule, evaluation=evaluation)
    facts = {SiteId(site.name): SiteFacts(50, 5) for site in job.sites}
    traffic = Traffic(job=job, layout=LAYOUT, facts=facts)
    for high in (True, False):
        sites = cost.bytes_of_sites(traffic, high=high).values()
        for span, ends in zip(traffic.of_run(), zip(*sites, strict=True), strict=True):
            end = span.high if high else span.low
            assert sum(ends) == pytest.approx(end, abs=SITES)


def test_long_lines_are_wide_only_for_large_messages():
    """TCP doubles what is under way until the message or the line ends it."""
    line = {"bytes_per_second": 125e6, "latency_seconds": 0.04}

    def slow(num_bytes: float, **changes: float) -> float:
        """Round trips beside delay and bytes."""
        at = {**line, **changes}
        bare = at["latency_seconds"] + num_bytes / at["bytes_per_second"]
        taken = cost.message_seconds(num_bytes, **at)
        return (taken - bare) / (2 * at["latency_seconds"])

    assert slow(14_600) == pytest.approx(0.0, abs=1e-9)
    assert slow(4 * 14_600) == pytest.approx(1.0)  # Half of two doublings.
    assert slow(16 * 14_600) == pytest.approx(2.0)
    # A line of 80 ms and 1 Gbit/s holds 10 MB: more changes nothing.
    assert slow(1e9) == pytest.approx(slow(1e7))
    assert slow(1e9, bytes_per_second=1e3) == pytest.approx(0.0, abs=1e-6)
    assert cost.message_seconds(1e6, 125e6, 0.0) == pytest.approx(0.008)
