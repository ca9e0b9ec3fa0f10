"""Which site gets another machine between rounds: the rule alone."""

from collections.abc import Sequence
from dataclasses import replace

from deploy.fleet.sizes import (
    FederationLoad,
    MachineSize,
    MeasuredSite,
    resize,
)

SIZES = [
    MachineSize(machine=f"g-{gpus}", speed=float(gpus), dollars_per_hour=float(gpus))
    for gpus in (1, 2, 4, 8)
]
FOUR = SIZES[2]


def federation(
    *busy: Sequence[float], rounds_left: int = 100, **changes: object
) -> FederationLoad:
    """Sites on machines of four GPUs, with the seconds of their last rounds."""
    sites = [
        MeasuredSite(name=f"site-{at}", busy_seconds=seconds, size=FOUR, sizes=SIZES)
        for at, seconds in enumerate(busy)
    ]
    load = FederationLoad(
        sites=sites, other_seconds=1.0, rounds_left=rounds_left, change_seconds=60.0
    )
    return replace(load, **changes)


def names(load: FederationLoad) -> dict[str, str]:
    return {each.site: each.size.machine for each in resize(load)}


def test_sites_that_wait_shrink():
    found = resize(federation([60.0] * 3, [60.0] * 3, [20.0] * 3))
    assert [(each.site, each.size.machine) for each in found] == [("site-2", "g-2")]
    assert "site-2 waits 67% of a round: g-2 instead of g-4" in found[0].reason


def test_straggler_grows_when_the_others_wait_for_it():
    load = federation([60.0] * 3, [25.0] * 3, [26.0] * 3, [27.0] * 3)
    found = resize(load)
    assert [(each.site, each.size.machine) for each in found] == [("site-0", "g-8")]
    assert "site-0 is the slowest site (60.0 s a round)" in found[0].reason


def test_equal_sites_keep_their_machines():
    """One more or less would only cost more, whatever the noise."""
    assert not resize(federation([60.0] * 3, [59.0, 61.0, 58.0], [57.0] * 3))


def test_a_site_does_not_shrink_to_become_the_straggler():
    assert not resize(federation([60.0] * 3, [60.0] * 3, [31.0] * 3))


def test_too_few_rounds_decide_nothing():
    assert not resize(federation([60.0] * 2, [20.0] * 2))
    assert not resize(federation([], []))


def test_a_change_that_the_rest_does_not_pay_for_is_not_made():
    load = federation([60.0] * 3, [60.0] * 3, [20.0] * 3, rounds_left=3)
    assert not resize(load)


def test_only_machines_that_are_allowed_are_chosen():
    load = federation([60.0] * 3, [60.0] * 3, [10.0] * 3)
    assert names(load) == {"site-2": "g-1"}
    sites = [replace(site, sizes=SIZES[1:3]) for site in load.sites]
    assert names(replace(load, sites=sites)) == {"site-2": "g-2"}


def test_a_deadline_that_would_be_missed_makes_the_straggler_grow():
    """Although it costs more: the other sites are small."""
    load = federation([60.0] * 3, [58.0] * 3, [20.0] * 3, [20.0] * 3)
    assert "site-0" not in names(load)
    late = replace(load, seconds_left=5000.0)
    assert not names(late)  # The second site would be as slow.
    alone = federation([60.0] * 3, [20.0] * 3, seconds_left=5000.0)
    assert names(alone)["site-0"] == "g-8"
