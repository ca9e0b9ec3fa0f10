"""What happens in a run, as typed events.

The coordinator emits them, ``event_log`` writes them as JSON lines, and ``monitoring``
reads nothing else. Times are seconds since the epoch (``at``) or durations; sizes are
bytes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest

from federation.members import Members, Standing
from federation.messages import FailureKind, MetricSums, Phase, PrivacySpent, Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """What every event says.

    Attributes:
        at: When.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent(RunEvent):
    """What every event of a round says.

    Attributes:
        at: When.
        round_index: The round; 1 for the first.
    """

    round_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteShare:
    """What one site holds.

    Attributes:
        site: Its name.
        cloud: Where it runs.
        region: The cloud's name of the region.
        train_examples: Training examples.
        held_out_examples: Examples kept for evaluation.
        counts: Training examples by class or by group, in the order of the event's
            ``labels``; empty if the data has neither.
    """

    site: str
    cloud: str
    region: str
    train_examples: int
    held_out_examples: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(RunEvent):
    """A coordinator has started or resumed a run.

    Attributes:
        at: When.
        run_id: ID of the run, such as ``20261122-162539-ce1c61``.
        job_name: ``name`` in the job file.
        rounds: Rounds that the job plans; of statistics none for lost ones.
        first_round: The round that this coordinator starts with.
        sites: Every site of the job.
        parameters: Length of the model's float vector: the values that are sent.
        engine: What brings tasks to the sites: ``inproc``, ``flower`` or ``virtual`` in
            a simulation, else ``deployed``.
        task: The job's task: ``classification``, ``causal_lm`` or ``module:function``.
        secure_aggregation: Whether the aggregator sees sums only.
        frozen: Number of the model's values that are neither trained nor sent.
        classes: Names of the classes of a confusion matrix, whose cells are metrics of
            held-out results, ``confusion_LABEL_PREDICTION``.
        weights: File of weights that the run began with, and its digest; empty where
            the factory drew them.
        relays: Names of the relays between sites and the aggregator.
        relayed: For each relay, its sites.
        subgroups: Names of the subgroups, whose results are in
            ``subgroup_NUMBER_count``, ``_loss`` and ``_correct``.
        replicas: Groups of sites that hold the same data.
    """

    run_id: str
    job_name: str
    rounds: int
    first_round: int
    sites: tuple[str, ...]
    parameters: int
    engine: str
    task: str
    secure_aggregation: bool = False
    frozen: int = 0
    classes: tuple[str, ...] = ()
    weights: str = ""
    relays: tuple[str, ...] = ()
    relayed: tuple[tuple[str, ...], ...] = ()
    subgroups: tuple[str, ...] = ()
    replicas: tuple[tuple[str, ...], ...] = ()

    def datasets(self, sites: Collection[str]) -> int:
        """How many different datasets sites hold: replicas hold one."""
        first = {site: group[0] for group in self.replicas for site in group}
        return len({first.get(site, site) for site in sites})

    def share(self, some: Collection[str], everyone: Collection[str]) -> str:
        """What part of all data some sites cover; empty if they cover all."""
        part, whole = self.datasets(some), self.datasets(everyone)
        what = "different datasets" if self.replicas else "sites"
        return f"{part:,} of {whole:,} {what}" if part < whole else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExtended(RunEvent):
    """From here on the run's job has more rounds or sites, and no other change.

    Attributes:
        at: When.
        last_round: The last round before.
        first_round: The next one. With secure aggregation a number is left out if the
            final model was evaluated under it.
        rounds_before: Rounds that the job had.
        rounds: Rounds that it has.
        job_before: Digest of the job before, 64 hexadecimal digits.
        job: Digest of the job from here on.
        joined: Sites that it did not have before.
    """

    last_round: int
    first_round: int
    rounds_before: int
    rounds: int
    job_before: str
    job: str
    joined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDistributed(RunEvent):
    """The data of each site (in a simulation: the partition).

    Attributes:
        at: When.
        label_kind: ``class``, ``group``, or empty if the data has neither.
        labels: Names of the classes or groups.
        shares: What each site holds.
    """

    label_kind: str
    labels: tuple[str, ...]
    shares: tuple[SiteShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesIntroduced(RunEvent):
    """Deployed sites have reported how much data they hold.

    They signed these numbers, and none of their updates may claim more.

    Attributes:
        at: When.
        sites: Sites that have reported.
        num_examples: Number of training examples at each.
    """

    sites: tuple[str, ...]
    num_examples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePrivacy:
    """What one site promises, and how it keeps it.

    Attributes:
        site: Its name.
        epsilon_cap: What its epsilon may not exceed over the run.
        delta: The probability that goes with it.
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        sampling_rate: Probability of each record to be in a step.
        steps_per_round: Private steps of a round, at most.
        held_out_noise: Standard deviation of the noise on the number of right
            held-out predictions; None if held-out results leave without noise.
    """

    site: str
    epsilon_cap: float
    delta: float
    noise_multiplier: float
    sampling_rate: float
    steps_per_round: int
    held_out_noise: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlanned(RunEvent):
    """The job's differential privacy, in numbers and words.

    Attributes:
        at: When.
        unit: Unit of privacy: ``record``, ``person``, ``joint`` or ``site``.
        relation: Neighbouring relation.
        accountant: What computes epsilon.
        sampling: What the accountant assumes about batches.
        holds_against: Whom the guarantee holds against, in words.
        signal_to_noise: With ``unit = "site"``, the largest norm of the mean update
            divided by that of its noise.
        sites: What each site promises.
        replaced: Layers that were replaced because they mix records, for example ``bn1:
            BatchNorm2d by GroupNorm``.
        withheld: What never leaves a site, and what leaves with noise, in words.
    """

    unit: str
    relation: str
    accountant: str
    sampling: str
    holds_against: str = ""
    signal_to_noise: float | None = None
    sites: tuple[SitePrivacy, ...]
    replaced: tuple[str, ...]
    withheld: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPredicted(RunEvent):
    """The predicted cost of the whole run, if every site answers every task.

    Attributes:
        at: When.
        bytes_down: Smallest and largest number of bytes to all sites.
        bytes_up: Smallest and largest number of bytes from all sites.
        seconds: Duration; None unless the job states speeds that determine it, as in
            virtual time.
        dollars: Of all sites, who are never away; None without prices in virtual time.
    """

    bytes_down: tuple[int, int]
    bytes_up: tuple[int, int]
    seconds: float | None
    dollars: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStarted(RoundEvent):
    """Tasks are about to be sent.

    Attributes:
        at: When.
        round_index: 1 for the first.
        cohort: Sites that get a task.
    """

    cohort: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorkChosen(RoundEvent):
    """How many local steps a round takes, and the numbers that led to it.

    The last four tuples run in parallel: one entry for each round that was measured.

    Attributes:
        at: When.
        round_index: Number of the round, from 1.
        first_step: Local steps of the run before it.
        num_steps: Its local steps.
        reason: ``start``: nothing is measured yet; ``measured``; or ``probe``: a round
            of another length, because arrival times alone do not tell steps from
            waiting.
        step_seconds: Seconds of a local step, as measured; None if not known.
        waiting_seconds: Seconds of a round in which no step is taken, as measured.
        share: Share of the round in which sites will train, at this pace.
        target: The share that the job aims at.
        rounds: Rounds that were measured.
        steps: Local steps of each.
        seconds: What each took.
        train_seconds: How long the site trained that answered last, if sites say it.
    """

    first_step: int
    num_steps: int
    reason: str
    step_seconds: float | None
    waiting_seconds: float | None
    share: float | None
    target: float
    rounds: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    train_seconds: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteAnswered(RoundEvent):
    """A site's update was accepted and added to the result.

    Attributes:
        at: When.
        round_index: Number of the round, from 1.
        site: The site that answered.
        asked_seconds: When its task was sent, counted from the start of the round.
        answered_seconds: When its answer arrived, counted from the start of the round.
        bytes_down: Bytes sent to the site for this task.
        bytes_up: Bytes received from the site.
        num_examples: Number of its training examples.
        num_steps: Optimiser steps that it took.
        weight: Weight of its update, not normalised.
        training: Sums over its batches, taken during training.
        evaluation: Results of the model that it began with on its held-out data, if the
            task asked for them.
        phases: Where its time went.
        spent: With differential privacy, what the site has spent so far.
        resources: Resources that its work used, without waiting and transfer; None if
            the site may not or cannot report them.
        staleness: How many models were newer than the one that it began with, in
            buffered rounds.

    Under secure aggregation what a site reports is known of all together only: here
    it is None, and the phases are empty.
    """

    site: str
    asked_seconds: float
    answered_seconds: float
    bytes_down: int
    bytes_up: int
    num_examples: int | None
    num_steps: int | None
    weight: float | None
    training: MetricSums | None
    evaluation: MetricSums | None
    phases: tuple[Phase, ...]
    spent: PrivacySpent | None = None
    resources: Resources | None = None
    staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFailed(RoundEvent):
    """An answer was refused, or none came.

    Attributes:
        at: When.
        round_index: Number of the round, from 1.
        site: The site that failed.
        kind: Why.
        message: What happened, in one line.
        asked_seconds: When its task was sent, counted from the start of the round; 0
            for a task of an earlier round.
        answered_seconds: When the answer arrived or the site failed, counted the same
            way.
        bytes_down: Bytes sent to the site for this task.
        bytes_up: Bytes received from the site.
    """

    site: str
    kind: FailureKind
    message: str
    asked_seconds: float
    answered_seconds: float
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken(RoundEvent):
    """A step of secure aggregation, other than the exchange of updates, has ended.

    The tuples run in parallel with ``sites``. A refused answer is a ``SiteFailed``
    event with its own bytes and does not occur here.

    Attributes:
        at: When.
        round_index: The round; the number after the last one for the final evaluation.
        step: ``advertise`` or ``confirm``, once per coordinator, or for each sum of
            whichever sites are ready, which say so in ``ready``; ``survivors`` or
            ``reveal``, in a round that allows dropouts; or ``evaluate``: results of the
            final model that stay masked because a later step had too few answers.
        sites: Sites whose answer counted, in the order of arrival.
        bytes_down: Bytes sent to each for this step.
        bytes_up: Bytes received from each.
    """

    step: str
    sites: tuple[str, ...]
    bytes_down: tuple[int, ...]
    bytes_up: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesLeftOut(RoundEvent):
    """The run continues without some sites.

    They have left, or violated the secure aggregation protocol. Emitted when the set
    changes, and once by each coordinator that resumes such a run. The first three
    tuples run in parallel, and so do the last two.

    Attributes:
        at: When.
        round_index: The round in which it happened, or before which a coordinator
            resumed.
        sites: All sites left out from now on; empty if all take part again.
        reasons: Why, in one line each; for a site that leaves, its own words.
        standings: ``leaving`` at the end of the round, ``gone`` until it returns, or
            ``left out`` because of what it did.
        returned: Sites that have left and come back so far.
        times: How often each of these did.
    """

    sites: tuple[str, ...]
    reasons: tuple[str, ...]
    standings: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    times: tuple[int, ...] = ()

    def named(self) -> Sequence[str]:
        """Each site with the reason, for a person."""
        rows = zip_longest(self.sites, self.reasons, self.standings)
        gone = (Standing.LEAVING, Standing.GONE)
        return [
            f"{site} ({standing}: {why})" if standing in gone else f"{site} ({why})"
            for site, why, standing in rows
        ]

    def back(self) -> Sequence[str]:
        """Each site that left and takes part again, for a person."""
        pairs = zip(self.returned, self.times, strict=False)
        return [f"{s} (returned {n}x)" for s, n in pairs if s not in self.sites]


def recalled(before: SitesLeftOut | None, event: SitesLeftOut) -> Sequence[str]:
    """Sites that a round asks again although they have not come back since."""
    if before is None:
        return ()
    times = dict(zip(before.returned, before.times, strict=False))
    back = {
        site
        for site, number in zip(event.returned, event.times, strict=False)
        if number > times.get(site, 0)
    }
    standings = zip(before.sites, before.standings, strict=False)
    gone = [site for site, standing in standings if standing == Standing.GONE]
    return [site for site in gone if site not in {*event.sites, *back}]


def left_out(members: Members, round_index: int, *, at: float) -> SitesLeftOut:
    """Say which of a run's sites rounds continue without."""
    found = [
        (site, one)
        for site, one in members.noted.items()
        if one.standing is not Standing.JOINED
    ]
    back = [(site, one) for site, one in members.noted.items() if one.replaced]
    return SitesLeftOut(
        at=at,
        round_index=round_index,
        sites=tuple(site for site, _ in found),
        reasons=tuple(one.reason for _, one in found),
        standings=tuple(one.standing.value for _, one in found),
        returned=tuple(site for site, _ in back),
        times=tuple(one.replaced for _, one in back),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsCompared(RoundEvent):
    """A robust rule has combined the means of groups of sites.

    All sites and the aggregator know who is in which group. The tuples run in parallel.

    Attributes:
        at: When.
        round_index: Number of the round, from 1.
        groups: Names of the sites of each group.
        norms: Euclidean norm of each group's mean update; None if it has no sum.
        distances: Its distance from the combined update; None if it has no sum.
        remarks: Why a group has no valid sum; empty if it has one.
    """

    groups: tuple[tuple[str, ...], ...]
    norms: tuple[float | None, ...]
    distances: tuple[float | None, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluated(RoundEvent):
    """The global model after ``round_index`` rounds, on held-out data.

    Sites evaluate the model that a round starts with, so this event comes one round
    later. The tuples run in parallel with ``sites``.

    Attributes:
        at: When.
        round_index: Number of rounds that the model was trained; 0 for the initial one.
        pooled: Over all sites that evaluated it.
        sites: These sites.
        by_site: Each site's own results; empty with secure aggregation.
        bytes_down: Bytes of a separate evaluation exchange, as after the last round; 0
            if the metrics came with updates.
        bytes_up: The same, from the sites.
        spent: With differential privacy, what each site has spent after a separate
            evaluation exchange; otherwise empty.
    """

    pooled: MetricSums
    sites: tuple[str, ...]
    by_site: tuple[MetricSums, ...]
    bytes_down: tuple[int, ...]
    bytes_up: tuple[int, ...]
    spent: tuple[PrivacySpent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFinished(RoundEvent):
    """The summary of a round.

    Attributes:
        at: When it ended.
        round_index: 1 for the first.
        status: ``completed``; or ``lost`` (no quorum) or ``discarded`` (result not
            finite), which leave the weights unchanged.
        asked: Sites that got a task.
        answered: Sites whose update was accepted.
        failed: Refused or missing answers, counted by kind.
        bytes_down: To all sites.
        bytes_up: From all sites.
        inside_down: Between relays and their sites; ``bytes_down`` and ``bytes_up`` are
            then those that leave a cloud.
        inside_up: The same, towards the relays.
        seconds: From the first task sent to the result; the checkpoint follows.
        phases: Where the aggregator's time went.
        training: Sums over the sites, taken during training.
        update_norm: Euclidean norm of the combined update; None if there is none.
        update_clip: Clip norm of the sites' updates, in weight units; None if nothing
            is clipped.
        epsilon: Largest epsilon that any participating site has spent so far, with
            differential privacy.
        resources: Resources that the round used at the aggregator.
        steps: Local steps that each of ``asked`` was given by its capacity; else empty.
    """

    status: str
    asked: tuple[str, ...]
    answered: tuple[str, ...]
    failed: tuple[tuple[str, int], ...]
    bytes_down: int
    bytes_up: int
    seconds: float
    phases: tuple[Phase, ...]
    training: MetricSums | None
    update_norm: float | None
    update_clip: float | None = None
    epsilon: float | None = None
    resources: Resources | None = None
    inside_down: int = 0
    inside_up: int = 0
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(RoundEvent):
    """The state after a round is durable.

    Attributes:
        at: When.
        round_index: Number of the round, from 1.
        bytes_written: New bytes in the store.
        seconds: How long it took.
    """

    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(RunEvent):
    """A checkpoint was incomplete or corrupt; the previous one is used.

    Attributes:
        at: When.
        key: Key of the object in the store.
        reason: What is wrong with it.
    """

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUse:
    """Calls of one operation to an object store.

    Attributes:
        operation: ``put``, ``read``, ``stat``, ``list``, ``delete`` or ``copy``.
        calls: How many; a call may be several requests.
        failed: Those that ended in an error, a missing object included.
        sent_bytes: Content written by those that did not.
        received_bytes: Content read by those that did not.
        seconds: How long all of them took, at the same time or one after another.
        requests: What the service was asked for them: parts, pages and attempts; 0 on
            this machine.
    """

    operation: str
    calls: int
    failed: int
    sent_bytes: int
    received_bytes: int
    seconds: float
    requests: int = 0

    def plus(self, other: "StoreUse | None") -> "StoreUse":
        """Add calls of the same operation."""
        if other is None:
            return self
        numbers = [one.name for one in fields(self) if one.name != "operation"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        return replace(self, **sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsed(RunEvent):
    """Use of a store since the last event of this kind.

    Use that a killed coordinator had not reported, and the copies at the end of a run,
    appear in no event.

    Attributes:
        at: When.
        url: Where the store is; no secrets.
        way: How it was reached, which determines the price: ``same region``, ``other
            region``, ``internet``, ``this machine`` or ``unknown``.
        uses: Use by operation.
        who: ``coordinator``, the name of a site, or ``all sites`` if a simulation
            splits one dataset.
        spared_calls: Number of reads that the disk cache saved.
        spared_bytes: Bytes of these reads.
    """

    url: str
    way: str
    uses: tuple[StoreUse, ...]
    who: str = ""
    spared_calls: int = 0
    spared_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSummed(RunEvent):
    """A site's own sums have come in a run of exact statistics, in the clear.

    Attributes:
        at: When.
        site: The site, which a completed round may have done without.
        counts: Whole numbers, as all that follow: its part of the same name.
        sums: Likewise.
        squares: Likewise.
        histograms: Likewise.
        categories: Likewise.
    """

    site: str
    counts: tuple[int, ...]
    sums: tuple[int, ...]
    squares: tuple[int, ...]
    histograms: tuple[int, ...]
    categories: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(RunEvent):
    """A warning that does not stop the run.

    Attributes:
        at: When.
        message: What it is, in one line.
        awaited: Sites that a round waits for from now on, before it asks any.
    """

    message: str
    awaited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelected(RoundEvent):
    """Which model a run leaves, if its job selects one.

    Attributes:
        at: When.
        round_index: The round of the model; of an average, that of the newest model in
            it.
        model: ``last``, ``best``, ``ema`` or ``swa``. The evaluation after the last
            round is that of the average, if there is one.
        models: Number of rounds' models that it was made of.
        metric: Name of the metric that models were compared by; empty if they were not.
        best_round: The round of the best model by it; None if none was evaluated.
        best_score: Its result.
        stopped_early: Whether the run ended before its last planned round because
            results no longer improved.
    """

    model: str
    models: int
    metric: str
    best_round: int | None
    best_score: float | None
    stopped_early: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesPaid(RunEvent):
    """What sites have cost in virtual time, from the run's beginning.

    A coordinator writes it when it ends, if the job states a price.

    Attributes:
        at: When.
        sites: Their names.
        dollars: Of the machine of each while it was not away, and of its traffic.
    """

    sites: tuple[str, ...]
    dollars: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(RunEvent):
    """The coordinator has finished.

    Attributes:
        at: When.
        status: ``completed``, ``stopped`` (on request), ``exhausted`` (the sites'
            privacy budgets allow no further round), ``failed``, or ``interrupted`` (the
            service starts another coordinator for the run).
        rounds_completed: Number of rounds that changed the weights.
        last_round: Index of the last round that ended.
        message: Why it ended, if not completed.
        seconds: Since this coordinator began.
    """

    status: str
    rounds_completed: int
    last_round: int
    message: str
    seconds: float


Event = (
    RunStarted
    | RunExtended
    | DataDistributed
    | SitesIntroduced
    | PrivacyPlanned
    | CostPredicted
    | RoundStarted
    | SiteAnswered
    | SiteFailed
    | StepTaken
    | SitesLeftOut
    | GroupsCompared
    | ModelEvaluated
    | LocalWorkChosen
    | RoundFinished
    | CheckpointSaved
    | CheckpointSkipped
    | StoreUsed
    | SiteSummed
    | Warned
    | ModelSelected
    | SitesPaid
    | RunFinished
)

Emit = Callable[[Event], None]
