"""Sites that come and go in virtual time."""

from collections.abc import Callable, Sequence

import pytest
from support import toy

from cloud_adapters.local.virtual_grid import (
    Absences,
    KnownAbsences,
    Machine,
    VirtualGrid,
    away_seconds,
)
from federation.clock import VirtualClock
from federation.ids import SiteId
from federation.messages import FailureKind, SiteFailure, SiteMessage, Task

SITE = toy.SITES[0]


class Working:
    """Works for three seconds on its own clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def handle(self, task: Task) -> SiteMessage:
        self.clock.sleep(3.0)
        return toy.update(task.site)

    def close(self) -> None: ...


class Away(Absences):
    """Away for ten seconds, from a given time on."""

    def __init__(self, begin: float) -> None:
        self.begin = begin

    def next(self, since: float) -> tuple[float, float]:
        return (
            (self.begin, self.begin + 10.0) if since < self.begin + 10.0 else (9e9,) * 2
        )


def answer(absences: Absences | None) -> tuple[SiteMessage, float]:
    clock, own = VirtualClock(), VirtualClock()
    machine = Machine(
        handler=Working(own),
        clock=own,
        down=1e9,
        up=1e9,
        latency_seconds=0.5,
        absences=absences,
    )
    grid = VirtualGrid({SITE: machine}, clock=clock)
    grid.send([toy.task(SITE)], deadline_seconds=60.0)
    (reply,) = grid.receive()
    return reply.message, clock.monotonic()


@pytest.mark.parametrize(("begin", "seconds"), [(0.2, 0.5), (2.0, 2.0), (3.9, 3.9)])
def test_work_and_answer_are_lost_when_a_site_leaves(begin: float, seconds: float):
    message, now = answer(Away(begin))
    assert isinstance(message, SiteFailure)
    assert message.kind is FailureKind.DISCONNECTED
    assert now == pytest.approx(seconds, abs=1e-3)


def test_absence_after_the_answer_changes_nothing():
    message, now = answer(Away(4.1))
    assert not isinstance(message, SiteFailure)
    assert now == pytest.approx(4.0, abs=1e-3)
    assert answer(None)[1] == now


def coming_back(
    quorum: int, tell: Callable[[Sequence[SiteId]], None] = lambda _: None
) -> tuple[VirtualGrid, VirtualClock]:
    """Make a grid of a site that is there, and two that come after 10 and 30 s."""
    clock = VirtualClock()
    machines = {}
    for site, away in zip(toy.SITES, [(), ((0.0, 10.0),), ((0.0, 30.0),)], strict=True):
        own = VirtualClock()
        machines[site] = Machine(
            handler=Working(own),
            clock=own,
            down=1e9,
            up=1e9,
            latency_seconds=0.5,
            absences=KnownAbsences(spells=away),
        )
    grid = VirtualGrid(machines, clock=clock, quorum=quorum, tell_awaited=tell)
    return grid, clock


@pytest.mark.parametrize(
    ("quorum", "deadline", "sent"),
    [(0, 60.0, 0.0), (1, 60.0, 0.0), (2, 60.0, 10.0), (3, 60.0, 30.0), (3, 20.0, 20.0)],
)
def test_a_round_waits_for_its_quorum(quorum: int, deadline: float, sent: float):
    """Or it would be lost at once, and three such rounds end a run."""
    grid, clock = coming_back(quorum)
    grid.send([toy.task(site) for site in toy.SITES], deadline_seconds=deadline)
    assert clock.monotonic() == sent


def test_sites_that_are_away_are_named_while_a_round_waits_for_its_quorum():
    told: list[Sequence[SiteId]] = []
    grid, _ = coming_back(3, told.append)
    grid.send([toy.task(site) for site in toy.SITES], deadline_seconds=60.0)
    assert told == [[*toy.SITES[1:]]]
    grid, _ = coming_back(1, told.append)
    grid.send([toy.task(site) for site in toy.SITES], deadline_seconds=60.0)
    assert len(told) == 1


@pytest.mark.parametrize(("quorum", "sent"), [(1, 0.0), (2, 10.0)])
def test_sites_at_work_are_of_the_quorum(quorum: int, sent: float):
    """A model of a buffered run may still come of them."""
    grid, clock = coming_back(quorum)
    here, *others = toy.SITES
    grid.send([toy.task(here)], deadline_seconds=60.0)
    later = [toy.task(site, round_index=2) for site in others]
    grid.send(later, deadline_seconds=60.0)
    assert clock.monotonic() == sent


@pytest.mark.parametrize(
    ("until", "away"), [(5.0, 0.0), (15.0, 5.0), (110.0, 15.0), (115.0, 20.0)]
)
def test_absences_add_up_to_a_time(until: float, away: float):
    spells = KnownAbsences(spells=((10.0, 20.0), (50.0, 55.0)), every=100.0)
    assert away_seconds(spells, until) == away


def test_share_of_sites_is_away_from_the_beginning():
    """Or a short run of many phones would meet all of them."""
    away = [
        Absences(share=0.8, seconds=3600.0, seed=1, site=f"site-{i}").next(0.0)[0] == 0
        for i in range(1_000)
    ]
    assert sum(away) / len(away) == pytest.approx(0.8, abs=0.05)
