"""Seconds and dollars of a run's rounds, from its bytes and from stated speeds.

Pure functions. A speeds file states what a user knows or has measured of sites and
lines, and what they pay; no price and no speed is assumed.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from federation.errors import JobError
from federation.ids import SiteId
from federation.job.job_keys import key
from federation.job.spec import JobSpec, MachineSpec, RelayLineSpec, TrainingSpec
from federation.rounds.local_work import (
    PARTS,
    bounds,
    by_capacity,
    in_round,
    is_auto,
    is_by_capacity,
    moves_data,
    steps_each,
    total_steps,
)
from federation.rounds.traffic import Leg, SiteFacts, Span, Traffic, examples_trained

PHASES = ("set-up", "first round", "later rounds", "final evaluation")

# See ``on_interface``.
_ENVELOPES, _IDLE_BYTES_PER_SECOND = 1.0, 14_000.0

# Of TCP: segments of a usual path, of which a connection begins with ten (RFC 6928).
_FIRST_BYTES = 10 * 1_460
# How many of a message's doublings it waits for, as measured between networks of one
# machine (`benchmarks/virtual_accuracy.py`): some of its connections are warm.
_DOUBLINGS = 0.5

UNKNOWN = math.nan
"""A price that nobody knows: what follows from it is unknown, too."""
_MOST_STEPS = 1 << 20
_PLAYED = 1000  # Models of a buffered run that are played to find its pace.

_GIGA = 1e9
_HOUR = 3600
_BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSpeed:
    """One site: its speed, its connection and its prices.

    Attributes:
        name: Name of the site.
        train_examples_per_second: Examples per second in training.
        evaluate_examples_per_second: Examples per second in evaluation.
        down_bytes_per_second: Bandwidth to the site.
        up_bytes_per_second: Bandwidth from the site.
        latency_seconds: One-way delay of a message.
        dollars_per_hour: Price of its machines during rounds.
        dollars_per_gigabyte: Price of traffic that leaves the site, or the cloud of
            its relay.
        dollars_per_gigabyte_received: Price of traffic that reaches the site: what its
            NAT gateway costs.
    """

    name: str
    train_examples_per_second: float = key(above=0.0)
    evaluate_examples_per_second: float = key(above=0.0)
    down_bytes_per_second: float = key(above=0.0)
    up_bytes_per_second: float = key(above=0.0)
    latency_seconds: float = key(default=0.0, low=0.0)
    dollars_per_hour: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte_received: float = key(default=0.0, low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySpeed:
    """The line between a relay and the aggregator.

    Attributes:
        name: Name of the relay.
        down_bytes_per_second: Bandwidth to the relay.
        up_bytes_per_second: Bandwidth from the relay.
        latency_seconds: One-way delay of a message.
    """

    name: str
    down_bytes_per_second: float = key(above=0.0)
    up_bytes_per_second: float = key(above=0.0)
    latency_seconds: float = key(default=0.0, low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """A speeds file.

    Attributes:
        start_seconds: How long machines are paid for before the job is submitted: they
            install.
        setup_seconds: Time from submitting a job until its run starts: the coordinator
            starts, and its sites are asked.
        first_round_seconds: What the first round takes longer than its work and its
            messages explain, since every program begins.
        combine_seconds: Time that the aggregator needs after the last answer of a
            round, until the next round starts.
        dollars_per_hour: Price of the aggregator during rounds.
        dollars_per_gigabyte: Price of traffic that leaves the aggregator.
        sites: One `[[sites]]` table for each site; of a site behind a relay, its line
            to the relay.
        relays: One `[[relays]]` table for each relay.
    """

    start_seconds: float = key(default=0.0, low=0.0)
    setup_seconds: float = key(default=0.0, low=0.0)
    first_round_seconds: float = key(default=0.0, low=0.0)
    combine_seconds: float = key(default=0.0, low=0.0)
    dollars_per_hour: float = key(default=0.0, low=0.0)
    dollars_per_gigabyte: float = key(default=0.0, low=0.0)
    sites: tuple[SiteSpeed, ...]
    relays: tuple[RelaySpeed, ...] = ()

    @property
    def has_prices(self) -> bool:
        """Whether an hour or a gigabyte of a site costs anything."""
        return any(s.dollars_per_hour or s.dollars_per_gigabyte for s in self.sites)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time and money of a run.

    Attributes:
        seconds: From its beginning to its end.
        phases: The same, by ``PHASES``.
        dollars: By ``machines``, ``aggregator``, ``traffic up`` and ``traffic down``;
            ``UNKNOWN`` where a price is.
    """

    seconds: float
    phases: Mapping[str, float]
    dollars: Mapping[str, float]

    @property
    def total(self) -> float:
        """Dollars of everything; ``UNKNOWN`` if a part of it is."""
        return sum(self.dollars.values())

    @property
    def is_known(self) -> bool:
        """Whether all its prices are known."""
        return not math.isnan(self.total)


@dataclass(frozen=True, slots=True)
class WorkSeconds:
    """Seconds of a round's training, and of one evaluation.

    Attributes:
        train: All local steps.
        evaluate: One evaluation.
        ahead: Those local steps that may be taken while messages are on their way.
        num_steps: How many local steps ``train`` is for; 1 where epochs count.
    """

    train: float
    evaluate: float
    ahead: float = 0.0
    num_steps: int = 1


def machine_speeds(
    machines: Sequence[MachineSpec], relays: Sequence[RelaySpeed] = ()
) -> Speeds:
    """State speeds and prices of simulated machines as a speeds file would."""
    return Speeds(
        relays=tuple(relays),
        sites=tuple(
            SiteSpeed(
                name=machine.site,
                train_examples_per_second=machine.examples_per_second,
                evaluate_examples_per_second=machine.examples_per_second,
                down_bytes_per_second=machine.down_mbit * _BYTES_PER_MBIT,
                up_bytes_per_second=machine.up_mbit * _BYTES_PER_MBIT,
                latency_seconds=machine.latency_seconds,
                dollars_per_hour=machine.dollars_per_hour,
                dollars_per_gigabyte=machine.dollars_per_gigabyte,
            )
            for machine in machines
        ),
    )


def virtual_speeds(job: JobSpec) -> Speeds:
    """The speeds that virtual time has, of machines and of relays, and its prices."""
    simulation = job.simulation
    relays = [relay_speed(simulation.relays, relay.name) for relay in job.relays]
    speeds = machine_speeds(simulation.machines, relays)
    return replace(speeds, combine_seconds=simulation.combine_seconds)


def relay_speed(lines: Sequence[RelayLineSpec], relay: str) -> RelaySpeed:
    """Find the speed of a relay's line, in virtual time; by default 100 Mbit/s."""
    line = next((one for one in lines if one.relay == relay), None)
    line = line or RelayLineSpec(relay=relay)
    return RelaySpeed(
        name=relay,
        down_bytes_per_second=line.down_mbit * _BYTES_PER_MBIT,
        up_bytes_per_second=line.up_mbit * _BYTES_PER_MBIT,
        latency_seconds=line.latency_seconds,
    )


def by_site(speeds: Speeds) -> Mapping[str, SiteSpeed]:
    """The stated speeds of sites, by name; the first of a name counts."""
    return {speed.name: speed for speed in reversed(speeds.sites)}


def speed_of(stated: Mapping[str, SiteSpeed], site: str) -> SiteSpeed:
    """Find the stated speed of a site.

    Raises:
        JobError: Nothing is.
    """
    if site in stated:
        return stated[site]
    raise JobError(f"has no table for site {site!r}: state its speeds", key="sites")


def message_seconds(
    num_bytes: float, bytes_per_second: float, latency_seconds: float
) -> float:
    """Seconds of a message on a line that was idle: its delay, bytes and slow start.

    TCP doubles what is under way in each round trip until the message has left or the
    line is full (RFC 5681, section 3.1), so that long lines are wide only for large
    messages.

    Args:
        num_bytes: Of the message.
        bytes_per_second: Width of the line.
        latency_seconds: One-way delay.
    """
    round_trip = 2 * latency_seconds
    under_way = min(num_bytes, bytes_per_second * round_trip)
    doublings = math.log2(max(1.0, under_way / _FIRST_BYTES))
    slow = _DOUBLINGS * doublings * round_trip
    return latency_seconds + num_bytes / bytes_per_second + slow


def work_seconds(
    training: TrainingSpec, facts: SiteFacts, speed: SiteSpeed
) -> WorkSeconds:
    """Seconds of a site's work: as predicted, and as virtual time passes."""
    train = examples_trained(training, facts) / speed.train_examples_per_second
    return WorkSeconds(
        train=train,
        evaluate=facts.held_out / speed.evaluate_examples_per_second,
        ahead=train * training.overlap_steps / (training.local_steps or 1),
        num_steps=training.local_steps or 1,
    )


def site_seconds(
    traffic: Traffic, site: SiteId, round_index: int, speed: SiteSpeed
) -> Mapping[str, float]:
    """Seconds of a site in a round: ``send``, ``evaluate``, ``train``, ``return``.

    Steps that coincide with messages, of this round down and of the last one up, take
    none. A site that waits for others has more time for them, but is not the slowest.
    All sites have equal work here: see ``work_shares``.
    """
    legs, facts = traffic.inside_legs(site, round_index), traffic.facts[site]
    trains = round_index <= traffic.job.rounds
    training = in_round(traffic.job, round_index).training
    work = work_seconds(training, facts, speed)
    send = sum(_down_seconds(leg, speed) for leg in legs)
    hidden = 0.0
    if work.ahead and trains and round_index > 1:
        before = traffic.inside_legs(site, round_index - 1)
        gap = sum(_up_seconds(leg, speed) for leg in before) + send
        hidden = min(work.ahead, gap)
    return {
        "send": send,
        "evaluate": traffic.evaluations(round_index) * work.evaluate,
        "train": trains * work.train - hidden,
        "return": sum(_up_seconds(leg, speed) for leg in legs),
    }


def _down_seconds(leg: Leg, speed: SiteSpeed | RelaySpeed) -> float:
    width = speed.down_bytes_per_second
    return message_seconds(leg.down.high, width, speed.latency_seconds)


def _up_seconds(leg: Leg, speed: SiteSpeed | RelaySpeed) -> float:
    width = speed.up_bytes_per_second
    return message_seconds(leg.up.high, width, speed.latency_seconds)


def round_seconds(traffic: Traffic, round_index: int, speeds: Speeds) -> float:
    """Seconds of a round that asks every site, and waits for the slowest.

    Of a buffered run, the mean time between two models.
    """
    job, shares = traffic.job, work_shares(traffic, round_index, speeds)
    found = {
        site: waiting + shares[site] * train
        for site, (waiting, train) in _work_parts(traffic, round_index, speeds).items()
    }
    seconds = max(found.values())
    if job.buffer_size is not None and round_index <= job.rounds:
        groups = job.schedule.groups or [(name,) for name in found]
        parts = [(max(found[s] for s in group), len(group)) for group in groups]
        models = 1 if round_index == 1 else min(job.rounds, _PLAYED)
        seconds = _between_models(parts, job.buffer_size, models)
    return seconds + speeds.combine_seconds


def _work_parts(
    traffic: Traffic, round_index: int, speeds: Speeds
) -> Mapping[str, tuple[float, float]]:
    """Seconds in which each site waits or evaluates, and in which it trains."""
    on_line, stated = _relay_seconds(traffic, round_index, speeds), by_site(speeds)
    found = dict[str, tuple[float, float]]()
    for name in (SiteId(site.name) for site in traffic.job.sites):
        took = site_seconds(traffic, name, round_index, speed_of(stated, name))
        relay = traffic.relay_of(name)
        beyond = on_line[relay.name] if relay else 0.0
        train = took["train"]
        found[name] = sum(took.values()) - train + beyond, train
    return found


def work_shares(
    traffic: Traffic, round_index: int, speeds: Speeds
) -> Mapping[str, float]:
    """How many times the steps or the data of equal work each site has in a round.

    By capacity, sites of a round end together; its first round has equal work.
    """
    job = traffic.job
    names = [site.name for site in job.sites]
    moves, trains = moves_data(job), round_index <= job.rounds
    if not trains or not (moves or is_by_capacity(job)):
        return dict.fromkeys(names, 1.0)
    usual = PARTS // len(names) if moves else job.training.local_steps or 1
    each = usual if moves else steps_each(job, round_index)
    if round_index == 1:
        return dict.fromkeys(names, each / usual)
    parts = _work_parts(traffic, round_index, speeds)
    found = by_capacity(
        job,
        [parts[name][0] for name in names],
        [parts[name][1] / usual for name in names],
        total=each * len(names),
    )
    return {name: n / usual for name, n in zip(names, found, strict=True)}


def _between_models(
    parts: Sequence[tuple[float, int]], size: int, models: int
) -> float:
    """Play a buffered run, in which a site waits after its answer for a new model.

    Args:
        parts: What each site, or each group with a sum of its own, takes for its
            updates, and how many they are.
        size: Updates that make a model.
        models: How many models to make.

    Returns:
        Seconds from the first model to the last one, over the models between; until the
        first, if it is the only one.
    """
    busy, now, first = [(seconds, i) for i, (seconds, _) in enumerate(parts)], 0.0, 0.0
    heapq.heapify(busy)
    for number in range(models):
        waiting = list[int]()
        while sum(parts[i][1] for i in waiting) < size:
            now, i = heapq.heappop(busy)
            waiting.append(i)
        for i in waiting:
            heapq.heappush(busy, (now + parts[i][0], i))
        first = first if number else now
    return now if models == 1 else (now - first) / (models - 1)


def _relay_seconds(
    traffic: Traffic, round_index: int, speeds: Speeds
) -> Mapping[str, float]:
    """Seconds that the messages of a round take between each relay and aggregator.

    Raises:
        JobError: A relay's speeds are not stated.
    """
    stated, found = {speed.name: speed for speed in speeds.relays}, dict[str, float]()
    for relay in traffic.job.relays:
        if relay.name not in stated:
            raise JobError(
                f"has no table for relay {relay.name!r}: state its speeds", key="relays"
            )
        speed = stated[relay.name]
        seconds = 0.0
        legs = [traffic.legs(SiteId(site), round_index) for site in relay.sites]
        for step in zip(*legs, strict=True):
            together = Leg(
                step=step[0].step,
                down=sum((leg.down for leg in step), Span()),
                up=sum((leg.up for leg in step), Span()),
            )
            seconds += _down_seconds(together, speed) + _up_seconds(together, speed)
        found[relay.name] = seconds
    return found


def phases_of_run(traffic: Traffic, speeds: Speeds) -> Mapping[str, float]:
    """Seconds of a run, by ``PHASES``; their sum is its time."""
    found = dict.fromkeys(PHASES, 0.0)
    found["set-up"] = speeds.setup_seconds
    found["first round"] = speeds.first_round_seconds
    for index, times in traffic.kinds_of_round().items():
        is_last = index > traffic.job.rounds
        phase = "first round" if index == 1 else "later rounds"
        phase = "final evaluation" if is_last else phase
        found[phase] += times * round_seconds(traffic, index, speeds)
    return found


def trained_share(traffic: Traffic, speeds: Speeds) -> float | None:
    """Share of its time after the first round that a site trains; the least of all.

    Steps that coincide with messages count, of course: they are training.
    """
    seconds, trained = 0.0, dict.fromkeys(traffic.facts, 0.0)
    stated = by_site(speeds)
    for index, times in traffic.kinds_of_round().items():
        if index == 1 or index > traffic.job.rounds:
            continue
        seconds += times * round_seconds(traffic, index, speeds)
        training = in_round(traffic.job, index).training
        shares = work_shares(traffic, index, speeds)
        for name, facts in traffic.facts.items():
            work = work_seconds(training, facts, speed_of(stated, name))
            trained[name] += times * shares[name] * work.train
    return min(trained.values()) / seconds if seconds else None


def steps_for_share(traffic: Traffic, speeds: Speeds, share: float) -> int | None:
    """The fewest local steps a round for which sites train at least a share of it.

    More steps also mean that sites drift further apart: see ``docs/howto/thin-lines``.
    """
    if traffic.job.training.local_steps is None:
        return None

    def share_of(steps: int) -> float:
        least = traffic.job.training.overlap_steps + 1
        training = replace(traffic.job.training, local_steps=max(steps, least))
        job = replace(traffic.job, training=training)
        return trained_share(replace(traffic, job=job), speeds) or 0.0

    high = 1
    while share_of(high) < share:
        high *= 2
        if high > _MOST_STEPS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share_of(middle) >= share else (middle, high)
    return high


def settled(traffic: Traffic, speeds: Speeds) -> Traffic:
    """The run with the local steps that it comes to, if it chooses them itself.

    The first rounds, which measure, have fewer; see ``federation.rounds.local_work``.
    """
    job = traffic.job
    if not is_auto(job):
        return traffic
    low, high = bounds(job)
    steps = steps_for_share(traffic, speeds, job.schedule.training_share) or high
    steps = min(max(steps, low), high)
    rounds = -(-total_steps(job) // steps)
    training = replace(job.training, local_steps=-(-total_steps(job) // rounds))
    return replace(traffic, job=replace(job, training=training, rounds=rounds))


def dollars(
    seconds: float, sites: Mapping[str, tuple[float, float]], speeds: Speeds
) -> Mapping[str, float]:
    """Price of a run, predicted or measured, by what costs it.

    Args:
        seconds: From its beginning to its end.
        sites: Bytes down and up of each site.
        speeds: The prices.

    Returns:
        Dollars by ``machines``, ``aggregator``, ``traffic up`` and ``traffic down``.

    Raises:
        JobError: Nothing is stated of a site.
    """
    hours = (seconds + speeds.start_seconds) / _HOUR
    machines = up = down = 0.0
    stated = by_site(speeds)
    for name, (to_site, from_site) in sites.items():
        speed = speed_of(stated, name)
        machines += hours * speed.dollars_per_hour
        up += from_site / _GIGA * speed.dollars_per_gigabyte
        per_gigabyte = speeds.dollars_per_gigabyte + speed.dollars_per_gigabyte_received
        down += to_site / _GIGA * per_gigabyte
    return {
        "machines": machines,
        "aggregator": hours * speeds.dollars_per_hour,
        "traffic up": up,
        "traffic down": down,
    }


def bytes_of_sites(
    traffic: Traffic, *, high: bool = True
) -> Mapping[str, tuple[int, int]]:
    """Bytes down and up of each site in a run.

    If a round, or a model of a buffered run, has a part of few sites, each site has an
    equal share of them: how often it is asked depends on the others' speed, too.

    Args:
        traffic: What it sends.
        high: Whether the most that it may send, or the least.
    """
    end, job = "high" if high else "low", traffic.job
    found: dict[str, tuple[int, int]] = {}
    rounds = [
        (index, times * getattr(traffic.asked(index), end) / len(job.sites))
        for index, times in traffic.kinds_of_round().items()
    ]
    at_work = 1.0 - traffic.asked(1).high / len(job.sites)  # At its end.
    for name in (SiteId(site.name) for site in job.sites):
        down = up = 0.0
        for index, times in rounds:
            legs = traffic.legs(name, index)
            down += times * sum(getattr(leg.down, end) for leg in legs)
            up += times * sum(getattr(leg.up, end) for leg in legs)
        if job.buffer_size is not None:
            to_site, from_site = traffic.left_open(name)
            down += at_work * getattr(to_site, end)
            up += at_work * getattr(from_site, end)
        found[name] = (round(down), round(up))
    return found


def on_interface(payload_bytes: float, seconds: float, num_sites: int) -> float:
    """Bytes that interfaces of sites count, for messages of so many bytes.

    Envelopes, TLS and what a site sends to ask for its next task, as measured between
    networks of one machine (`benchmarks/plan_accuracy.py`). A link that counts whole
    Ethernet frames of 1,500 bytes adds 3 to 4 % for their headers.
    """
    return payload_bytes * _ENVELOPES + seconds * num_sites * _IDLE_BYTES_PER_SECOND


def of_run(traffic: Traffic, speeds: Speeds) -> Cost:
    """Cost of all rounds, one after another, and of the final evaluation."""
    traffic = settled(traffic, speeds)
    phases = phases_of_run(traffic, speeds)
    seconds = sum(phases.values())
    return Cost(
        seconds=seconds,
        phases=phases,
        dollars=dollars(seconds, bytes_of_sites(traffic), speeds),
    )


# With each checkpoint: its manifest, and the copy of the run's events.
_FILES = 2
# At the start; then with each checkpoint those that tell what may be removed.
_FIRST_LISTS, _LISTS = 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRequests:
    """Requests of a run, by what they cost.

    Attributes:
        writes: Those that write or list.
        reads: Those that read. Clouds charge nothing for those that delete.
    """

    writes: int
    reads: int


def requests_of_run(
    model_bytes: int, *, rounds: int, keep: int, vectors: int, chunk_bytes: int
) -> BucketRequests:
    """Count the requests of a run.

    Args:
        model_bytes: Size of the model's floats.
        rounds: Rounds of the run; it also saves what it begins with.
        keep: Checkpoints that are kept.
        vectors: Vectors of the model's size that the server's optimiser remembers.
        chunk_bytes: A larger blob is stored in objects of this size, whose list is read
            before each is written.
    """
    blobs = [model_bytes, *([vectors * model_bytes] * bool(vectors))]
    objects = sum(max(1, -(-size // chunk_bytes)) for size in blobs)
    chunked = sum(size > chunk_bytes for size in blobs)
    saves = rounds + 1
    lists = _FIRST_LISTS + _LISTS * rounds + chunked * saves
    return BucketRequests(
        writes=saves * (objects + _FILES) + lists,
        # Before an object is deleted, someone looks whether it is still the same.
        reads=max(0, saves - keep) * objects,
    )
