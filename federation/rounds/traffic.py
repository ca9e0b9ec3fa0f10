"""Bytes that a run will send, before it runs.

Pure functions of a job, a model's layout and what the sites hold. Each message is sized
as the grid sizes it, so the bytes are exact, headers and secure aggregation included.
One thing is not known before the run: a site reports on its own work in a header, as
text, and times, losses, hits and privacy spent differ in length by a few characters.
A header is padded to 64 bytes, so mostly that changes nothing; where it does, the two
ends of a ``Span`` differ by 64 bytes for a message.

All of it is for a run in which every site answers every task, from its first round on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from federation.compression.apart import fitted
from federation.compression.codec import Codec, Links
from federation.ids import RunId, SiteId
from federation.job.adapter_ranks import links_of, ranks_of
from federation.job.kept_state import keepers
from federation.job.metrics import Metric, metrics_of, reported_of
from federation.job.spec import JobSpec, RelaySpec, TrainingSpec
from federation.job.statistics_checks import planned_rounds
from federation.messages import (
    Energy,
    LedgerAnchor,
    MaskedUpdate,
    MetricSums,
    Phase,
    PrivacySpent,
    RelayedSum,
    Resources,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteMessage,
    SiteUpdate,
    TaskKind,
)
from federation.methods.registry import follows_counted
from federation.resources import CLOCK, PROCESS
from federation.rounds.local_work import (
    PARTS,
    accumulate_in,
    allocated,
    bounds,
    fewest_parts,
    fewest_rounds,
    in_round,
    is_by_capacity,
    leaves_steps_open,
    moves_data,
    steps_each,
    total_steps,
)
from federation.vectors import Layout
from federation.wire.frame import encoded_size
from federation.wire.relayed import down_sizes, up_sizes

_RUN = RunId("20260101-000000-000000")  # Every run id that we make is as long.
# Numbers whose texts are the shortest and the longest that times, losses and epsilons
# of a run have. A measured time is never exactly 0, which would be shorter still.
_SHORT, _LONG = 1.0, 2.0**-30
_ENERGY = Energy(
    joules=(_LONG, _LONG), grams=(_LONG, _LONG), method="RAPL and model and NVML"
)
_MEMORY = 10**12  # As many digits as a site's memory may have.

# Bytes of a step's messages, down and up, by site.
StepSizes = Mapping[SecureStep, Mapping[SiteId, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes, mostly with equal ends."""

    low: int = 0
    high: int = 0

    def __add__(self, other: "Span") -> "Span":
        """Add two numbers."""
        return Span(self.low + other.low, self.high + other.high)


@dataclass(frozen=True, slots=True)
class Leg:
    """An exchange with one site: the name of its step, bytes down, bytes up."""

    step: str
    down: Span
    up: Span


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """A site's numbers of training and held-out examples."""

    train: int
    held_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureSizes:
    """Bytes of the messages of secure aggregation.

    Attributes:
        setup: Of each step before the first round.
        opening: Of each step after the updates of a round.
        first_task: What goes with the model in the first round.
        next_tasks: The same in every later round that trains, by fragment.
        last_task: The same in the evaluation of the final model.
        answer: What comes with the masked words.
        header_words: Words of the masked header.
        relayed: What each relay signs beside the sum of its sites' words.
        first_updates: Bytes of the masked words in the first round of each fragment.
        next_updates: The same in every later one.
    """

    setup: StepSizes
    opening: StepSizes
    first_task: int
    next_tasks: tuple[int, ...]
    last_task: int
    answer: int
    header_words: int
    first_updates: tuple[int, ...]
    next_updates: tuple[int, ...]
    relayed: Mapping[SiteId, int] = field(default_factory=dict)

    def task(self, round_index: int, kind: TaskKind) -> int:
        """Bytes that go with the model."""
        if round_index == 1:
            return self.first_task
        if kind is TaskKind.EVALUATE:
            return self.last_task
        return self.next_tasks[(round_index - 1) % len(self.next_tasks)]

    def update(self, round_index: int) -> int:
        """Bytes of the masked words of a round."""
        lap, fragment = divmod(round_index - 1, len(self.next_updates))
        return (self.next_updates if lap else self.first_updates)[fragment]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a job sends.

    Attributes:
        layout: Layout of its model; what is frozen is not in its vectors.
        facts: What each site holds.
        secure: Sizes of its messages, if the job has secure aggregation.
        grouped: Those of each site, where groups have sums of their own.
        measured: Whether sites measure more than time, as they do but in virtual time.
        reports_energy: Whether sites may report energy, as only deployed ones do.
    """

    job: JobSpec
    layout: Layout
    facts: Mapping[SiteId, SiteFacts]
    secure: SecureSizes | None = None
    grouped: Mapping[SiteId, SecureSizes] = field(default_factory=dict)
    measured: bool = True
    reports_energy: bool = False
    _shares: dict[tuple[str, int, TaskKind], Mapping[SiteId, tuple[Span, Span]]] = (
        field(default_factory=dict, init=False, repr=False, compare=False)
    )
    _alike: dict[tuple[int, SiteFacts, int | None, int], Sequence[Leg]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def legs(self, site: SiteId, round_index: int) -> Sequence[Leg]:
        """Every exchange with a site that a round asks, on the aggregator's line.

        The round after the last is the evaluation of the final model. Of a relay's
        messages, each of its sites accounts for a share.
        """
        return self._legs(site, round_index, self.relay_of(site))

    def inside_legs(self, site: SiteId, round_index: int) -> Sequence[Leg]:
        """The same on the site's own line: to its relay, or to the aggregator."""
        return self._legs(site, round_index, None)

    def relay_of(self, site: SiteId) -> RelaySpec | None:
        """The relay that a site is behind."""
        return next((one for one in self.job.relays if site in one.sites), None)

    def _legs(
        self, site: SiteId, round_index: int, relay: RelaySpec | None
    ) -> Sequence[Leg]:
        job = self.job
        if round_index > job.rounds and job.evaluation.every == 0:
            return ()
        if relay is not None or self._secure(site) is not None:
            return self._exchanges(site, round_index, relay)
        # A message differs by its site's data, ranks and the length of its name.
        key = len(site), self.facts[site], self._ranks.get(site), round_index
        if key not in self._alike:
            self._alike[key] = self._exchanges(site, round_index, None)
        return self._alike[key]

    def _secure(self, site: SiteId) -> SecureSizes | None:
        return self.grouped.get(site, self.secure)

    def _exchanges(
        self, site: SiteId, round_index: int, relay: RelaySpec | None
    ) -> Sequence[Leg]:
        job, secure = self.job, self._secure(site)
        kind = TaskKind.TRAIN if round_index <= job.rounds else TaskKind.EVALUATE
        if relay is None:
            down = _span(self._tasks(site, round_index, kind))
            up = _span(self._answer(site, round_index, kind, end) for end in (0, 1))
        else:
            down, up = self._relayed(site, round_index, kind, relay)
        main = Leg(kind.value, down, up)
        if secure is None:
            return (main,)
        setup = secure.setup if round_index == 1 else {}
        before = [_step(site, 0, step, sizes) for step, sizes in setup.items()]
        after = secure.opening.items()
        return (*before, main, *(_step(site, round_index, *each) for each in after))

    def _relayed(
        self, site: SiteId, index: int, kind: TaskKind, relay: RelaySpec
    ) -> tuple[Span, Span]:
        """A site's shares of a round's messages to and from its relay."""
        key = relay.name, index, kind
        if key not in self._shares:  # All its sites need them.
            self._shares[key] = self._shares_of(index, kind, relay)
        return self._shares[key][site]

    def _shares_of(
        self, index: int, kind: TaskKind, relay: RelaySpec
    ) -> Mapping[SiteId, tuple[Span, Span]]:
        behind = {*relay.sites}
        sites = [SiteId(s.name) for s in self.job.sites if s.name in behind]
        tasks = [[*self._tasks(name, index, kind)] for name in sites]
        down, up = list[list[int]](), list[list[int]]()
        for end in (0, 1):
            forms = [each[end] for each in tasks]
            same = [replace(task, weights_d=forms[0].weights_d) for task in forms]
            down.append(down_sizes(same))
            answers = [self._answer(name, index, kind, end) for name in sites]
            total = self._total(SiteId(relay.name), answers[0])
            through = None
            if total is not None:
                through = RelayedSum(sites=tuple(sites), update=total)
            up.append(up_sizes(through, answers))
        return {
            site: (Span(min(downs), max(downs)), Span(min(ups), max(ups)))
            for site, downs, ups in zip(
                sites, zip(*down, strict=True), zip(*up, strict=True), strict=True
            )
        }

    def _total(
        self, relay: SiteId, part: SiteMessage
    ) -> SiteUpdate | MaskedUpdate | None:
        """A relay's sum of answers like one."""
        if isinstance(part, MaskedUpdate) and self.secure is not None:
            body = bytes(self.secure.relayed[relay])
            return replace(part, site=relay, body=body, spent=None)
        if isinstance(part, SiteUpdate):
            return replace(
                part,
                site=relay,
                integers_m=part.integers_m[:0],
                num_examples=0,
                num_steps=0,
                training=None,
                evaluation=None,
                evaluation_after=None,
                phases=(),
                spent=None,
                resources=None,
            )
        return None

    def evaluations(self, round_index: int) -> int:
        """How often a site evaluates in a round."""
        dynamic = self.job.aggregation.weights == "dynamic"
        if round_index > self.job.rounds:
            return int(self.job.evaluation.every > 0)
        return 2 if dynamic else int(self._evaluates(round_index))

    def of_round(self, round_index: int) -> tuple[Span, Span]:
        """Bytes of a round, down and up.

        If not all sites take part in it, from the cheapest choice to the most
        expensive.
        """
        asked = self.asked(round_index)
        legs = [self.legs(SiteId(s.name), round_index) for s in self.job.sites]
        downs = [sum((leg.down for leg in each), Span()) for each in legs]
        ups = [sum((leg.up for leg in each), Span()) for each in legs]
        return _draw(asked, downs), _draw(asked, ups)

    def asked(self, round_index: int) -> Span:
        """How many sites have a part in a round, or in a model of a buffered run."""
        if round_index > self.job.rounds:
            return Span(len(self.job.sites), len(self.job.sites))
        least = self.job.buffer_size or self.job.cohort_size
        return Span(least, max(map(len, self.job.schedule.groups), default=least))

    def left_open(self, site: SiteId) -> tuple[Span, Span]:
        """Bytes of a site's task at the end of a buffered run, down and up.

        A group has keys and its first task apart from those of other groups, and the
        final evaluation is the first task of one that has opened no sum.
        """
        first, last, final = (
            {leg.step: leg for leg in self.legs(site, index)}
            for index in (1, self.job.rounds, self.job.rounds + 1)
        )
        name, steps = TaskKind.TRAIN.value, [*first]
        main = first[name], last[name]
        before = [first[step] for step in steps[: steps.index(name)]]
        after = [first[step] for step in steps[steps.index(name) + 1 :]]
        high = max(leg.down.high for leg in main)
        if final and before:
            high += max(0, main[0].down.high - final[TaskKind.EVALUATE.value].down.high)
        down = Span(min(leg.down.low for leg in main), high)
        up = Span(0, max(leg.up.high for leg in main))
        for leg in before:
            down, up = down + leg.down, up + leg.up
        for leg in after:
            down += Span(0, leg.down.high)
            up += Span(0, leg.up.high)
        return down, up

    def of_run(self) -> tuple[Span, Span]:
        """Bytes of all rounds and of the final evaluation, down and up.

        Also of the tasks on which sites of a buffered run are at work at its end.
        """
        fewest = fewest_rounds(self.job)
        if fewest == self.job.rounds:
            return _of_rounds(self)
        shortest = replace(self, job=replace(self.job, rounds=fewest))
        (least_down, least_up), (down, up) = map(_of_rounds, (shortest, self))
        return Span(least_down.low, down.high), Span(least_up.low, up.high)

    def kinds_of_round(self) -> Mapping[int, int]:
        """One round of each kind, and how many are like it in bytes and work.

        Rounds differ in what they evaluate, and in the digits of their numbers.
        """
        job = self.job
        first_like: dict[tuple[object, ...], int] = {}
        times: dict[int, int] = {}
        for index in range(1, planned_rounds(job) + 1 + (job.evaluation.every > 0)):
            likeness = (
                index == 1,
                is_by_capacity(job) and steps_each(job, index),
                self._exchanged(index),
                index > job.rounds,
                self._evaluates(index),
                accumulate_in(job.training, index),
                len(str(index)),
                len(str(index - 1)),
            )
            first = first_like.setdefault(likeness, index)
            times[first] = times.get(first, 0) + 1
        return times

    def _exchanged(self, round_index: int) -> int:
        """A number that is equal for rounds which exchange the same bits up and down.

        With few levels, the first round of a fragment sends more up, and the round
        after it more down.
        """
        count = self.job.communication.fragments
        if self.job.privacy.secure_aggregation.levels is None:
            return 0
        if round_index <= count + 1:
            return -round_index
        return (round_index - 1) % count

    def _evaluates(self, round_index: int) -> bool:
        every = self.job.evaluation.every
        return every > 0 and (round_index - 1) % every == 0

    @cached_property
    def _ranks(self) -> Mapping[SiteId, int]:
        return ranks_of(self.job)

    @cached_property
    def _follows_counted(self) -> bool:
        return follows_counted(self.job)

    @cached_property
    def _links(self) -> Links:
        return fitted(self.job.communication.links, self.layout)

    def _up(self, site: SiteId) -> Codec:
        """The codec of a site's updates."""
        return links_of(self.job, self.layout, self._ranks.get(site)).up

    @property
    def _asks_all(self) -> bool:
        return self.asked(1).low == len(self.job.sites)

    @property
    def _is_private(self) -> bool:
        return self.job.privacy.differential_privacy.enabled

    def _tasks(self, site: SiteId, index: int, kind: TaskKind) -> Iterator[RoundTask]:
        """Every form of a task.

        A site that missed a round gets the whole model, and hears of an older update.
        """
        links = self.job.communication.links
        changes = (links.changes or links.sums) and index > 1
        if index > self.job.rounds and self.job.leaves_average:
            changes = False  # No site can compute it.
        for changed in (True, False) if changes and not self._asks_all else (changes,):
            for end in (0, 1):
                yield self._task(site, index, kind, end, changed=changed)

    def _task(
        self, site: SiteId, index: int, kind: TaskKind, end: int, *, changed: bool
    ) -> RoundTask:
        links, trains = self._links, kind is TaskKind.TRAIN
        told = links.feedback > 0 or self._follows_counted
        settles = told and trains and (end == 1 or self._asks_all)
        charges = end * self._is_private * (index - 1)
        steps = (
            self._steps(index, end)
            if trains and leaves_steps_open(self.job)
            else range(0)
        )
        sizes = self._secure(site)
        secure = 0 if sizes is None else sizes.task(index, kind)
        begins = secure and index > 1 and keepers(self.job, self.layout, trains=trains)
        return RoundTask(
            run_id=_RUN,
            round_index=index,
            site=site,
            kind=kind,
            layout_digest=self.layout.digest,
            weights_d=self._model(index, changed=changed),
            changed_to=self.layout.digest if changed else "",  # A digest is as long.
            integers_m=_nothing(self.layout.num_integers, "i8"),
            evaluate=self._evaluates(index),
            evaluate_after=self.job.aggregation.weights == "dynamic",
            secure=bytes(secure),
            anchor=LedgerAnchor(train=charges, evaluate=2 * charges),
            based_on=index - 1,
            counted=index - 1 if settles else 0,
            num_steps=len(steps),
            first_step=steps.start,
            state_round=index - 1 if begins else 0,
            state_context=self.layout.digest if begins else "",
        )

    def _steps(self, index: int, end: int) -> range:
        """Local steps of a round that is free to choose them: in few or many digits."""
        if moves_data(self.job):
            begin = end * PARTS * self.job.rounds
            return range(begin, begin + (PARTS if end else fewest_parts(self.job)))
        low, high = bounds(self.job)
        if is_by_capacity(self.job):
            return allocated(self.job, index, high if end else low)
        if not end:
            return range(min(1, index - 1), low + min(1, index - 1))
        before = total_steps(self.job) - low if index > 1 else 0
        return range(before, before + high)

    def _model(self, index: int, *, changed: bool) -> np.ndarray:
        """The words of a model, or of what a site computes it from."""
        links = self._links
        if changed and links.sums:
            assert self.secure is not None  # noqa: S101 -- as the job was checked
            return _nothing(self.secure.update(index - 1) // 8, "u8")
        return _words(links.down if changed else links.whole, self.layout)

    def _answer(
        self, site: SiteId, index: int, kind: TaskKind, end: int
    ) -> SiteMessage:
        facts, training = self.facts[site], self.job.training
        secure = self._secure(site)
        spent = self._spent(index, end)
        held_out = _sums(reported_of(self.job), facts.held_out, end)
        if secure is not None:
            num_bytes = secure.update(index) if kind is TaskKind.TRAIN else 0
            return MaskedUpdate(
                run_id=_RUN,
                round_index=index,
                site=site,
                layout_digest=self.layout.digest,
                words=_nothing(num_bytes, "u1"),
                header_h=_nothing(secure.header_words, "u8"),
                body=bytes(secure.answer),
                spent=spent,
                based_on=index - 1,
            )
        if kind is TaskKind.EVALUATE:
            return SiteEvaluation(
                run_id=_RUN,
                round_index=index,
                site=site,
                evaluation=held_out,
                phases=self._phases(("evaluate",), end),
                spent=spent,
                based_on=index - 1,
            )
        before = self.evaluations(index) > 0
        after = self.job.aggregation.weights == "dynamic"
        names = ("evaluate",) * before + ("train",) + ("evaluate",) * after
        trained = examples_trained(in_round(self.job, index).training, facts)
        private = self._is_private
        return SiteUpdate(
            run_id=_RUN,
            round_index=index,
            site=site,
            layout_digest=self.layout.digest,
            delta_d=_words(self._up(site), self.layout),
            integers_m=_nothing(self.layout.num_integers, "i8"),
            num_examples=0 if private else facts.train,
            num_steps=trained if end else 1,
            training=None
            if private or self.job.statistics
            else _sums(metrics_of(training), trained, end),
            evaluation=held_out if before else None,
            evaluation_after=held_out if after else None,
            phases=self._phases((*names, "prepare"), end),
            spent=spent,
            based_on=index - 1,
            resources=None if private else self._resources(end),
        )

    def _phases(self, names: Iterable[str], end: int) -> tuple[Phase, ...]:
        # In virtual time much takes none, and a time of 0 is shorter than any other.
        shortest = _SHORT if self.measured else 0.0
        seconds = _LONG if end else shortest
        return tuple(
            Phase(name=name, start_seconds=seconds, seconds=seconds)
            for name in names
            if not self._is_private
        )

    def _resources(self, end: int) -> Resources:
        seconds = _LONG if end else _SHORT
        return Resources(
            busy_seconds=seconds,
            cpu_seconds=seconds if self.measured else None,
            peak_memory_bytes=_MEMORY if end and self.measured else None,
            method=PROCESS.method if end and self.measured else CLOCK.method,
            energy=_ENERGY if end and self.reports_energy else None,
        )

    def _spent(self, index: int, end: int) -> PrivacySpent | None:
        if not self._is_private:
            return None
        number = _LONG if end else _SHORT
        return PrivacySpent(
            epsilon=number,
            delta=_LONG if end else 0.5,
            held_out_epsilon=number if end else None,
            anchor=LedgerAnchor(train=end * index, evaluate=end * 2 * index),
        )


def _of_rounds(traffic: Traffic) -> tuple[Span, Span]:
    """Bytes of as many rounds as the job has, and of the final evaluation."""
    down = up = Span()
    for round_index, times in traffic.kinds_of_round().items():
        one_down, one_up = traffic.of_round(round_index)
        down += Span(times * one_down.low, times * one_down.high)
        up += Span(times * one_up.low, times * one_up.high)
    open_down, open_up = _left_open(traffic)
    return down + open_down, up + open_up


def _left_open(traffic: Traffic) -> tuple[Span, Span]:
    """Bytes of what a buffered run sends beside its models' own tasks.

    Every site has a task from the first model on, and those without a part in the last
    one still have theirs when it is made: some answer before the run is over. They
    train once more for each update that is too late to count: more models than
    ``max_staleness`` have been made meanwhile.
    """
    job = traffic.job
    if job.buffer_size is None:
        return Span(), Span()
    names = [SiteId(site.name) for site in job.sites]
    left = [traffic.left_open(name) for name in names]
    asked = traffic.asked(1)
    count = Span(len(names) - asked.high, len(names) - asked.low)
    down, up = (_draw(count, spans) for spans in zip(*left, strict=True))
    late = job.rounds // (job.schedule.max_staleness + 1)
    legs = [traffic.legs(name, job.rounds) for name in names]
    late_down = _draw(count, [sum((leg.down for leg in each), Span()) for each in legs])
    late_up = _draw(count, [sum((leg.up for leg in each), Span()) for each in legs])
    return down + Span(0, late * late_down.high), up + Span(0, late * late_up.high)


def examples_trained(training: TrainingSpec, facts: SiteFacts) -> int:
    """Examples that a site's steps of a round go through."""
    if training.local_steps is not None:
        return training.local_steps * training.batch_size * training.accumulate
    return training.num_epochs * facts.train


def _step(
    site: SiteId,
    index: int,
    step: SecureStep,
    sizes: Mapping[SiteId, tuple[int, int]],
) -> Leg:
    down, up = map(bytes, sizes[site])
    about = {"run_id": _RUN, "round_index": index, "site": site, "step": step}
    task = encoded_size(SecureTask(**about, body=down))  # type: ignore[arg-type]
    answer = encoded_size(SecureAnswer(**about, body=up))  # type: ignore[arg-type]
    return Leg(step.value, Span(task, task), Span(answer, answer))


def _words(codec: Codec, layout: Layout) -> np.ndarray:
    return _nothing(codec.num_words(layout.size), codec.dtype)


def _nothing(size: int, kind: str | np.dtype[np.generic]) -> np.ndarray:
    """A vector of a length without memory for its values."""
    return np.broadcast_to(np.zeros(1, kind), (size,))


def _sums(metrics: Mapping[str, Metric], count: int, end: int) -> MetricSums:
    sums = {}
    for name, metric in metrics.items():
        # 0, as of a bin without records, is the shortest; a minus sign is a byte more.
        most = count if metric.is_whole else _LONG
        sums[name] = end * (-most if end and metric.low < 0 else most)
    return MetricSums(count=count, loss_sum=_LONG if end else _SHORT, metrics=sums)


def _span(messages: Iterable[RoundTask | SiteMessage]) -> Span:
    sizes = list(map(encoded_size, messages))
    return Span(min(sizes), max(sizes))


def _draw(count: Span, spans: Sequence[Span]) -> Span:
    """Draw a number of sites: the fewest and smallest ones, and the most and largest.

    Args:
        count: How many.
        spans: What each of all sites would send.
    """
    low = sorted(span.low for span in spans)[: count.low]
    high = sorted((span.high for span in spans), reverse=True)[: count.high]
    return Span(sum(low), sum(high))
