"""Speeds that a run has shown, for the model of ``federation.rounds.cost``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from federation.errors import JobError
from federation.events import SiteAnswered
from federation.ids import SiteId
from federation.messages import SecureStep
from federation.rounds import cost
from federation.rounds.cost import SiteSpeed, Speeds
from federation.rounds.local_work import in_round
from federation.rounds.traffic import Traffic, examples_trained
from monitoring.views.run_plan import round_length
from monitoring.views.run_view import RunView

# Of a line, whose time is part of the rest of a run.
_NO_LIMIT = 1e15


def measured_speeds(
    view: RunView,
    traffic: Traffic,
    *,
    submitted: float | None = None,
    sites: Sequence[SiteSpeed] | None = None,
) -> Speeds:
    """Take the speeds of sites from a run.

    A site's rates are those of the rounds after the first. All else that these took,
    lines included, becomes ``combine_seconds``; what the first took longer becomes
    ``first_round_seconds``. With secure aggregation or differential privacy sites
    report no phases: then a site's whole answer counts as training.

    Args:
        view: The run.
        traffic: What the run's own job sends.
        submitted: When it was submitted, in seconds since 1970; None if nobody knows,
            and then nothing is known of its set-up.
        sites: Their rates, if another run has shown them better.

    Raises:
        JobError: The run has no round after the first, or has other sites.
    """
    rounds = [each for each in view.rounds if each.finished is not None]
    steps = {each.index: each.work.num_steps for each in rounds if each.work}
    later = [each for each in rounds if each.index > 1]
    answers: dict[str, list[tuple[int, SiteAnswered]]] = {}
    for each in later:
        for found in each.reports:
            if isinstance(found, SiteAnswered):
                answers.setdefault(found.site, []).append((each.index, found))
    names = [site.name for site in traffic.job.sites]
    if not set(names) <= answers.keys():
        raise JobError(
            "tells no speeds: it needs two rounds or more, with an answer of every "
            "site of the job",
            key="--like",
        )
    if sites is None:
        sites = [_speed_of(name, answers[name], traffic, steps) for name in names]
    speeds = Speeds(sites=tuple(sites))
    explained = [
        cost.round_seconds(
            _of_steps(traffic, steps.get(each.index)), each.index, speeds
        )
        for each in later
    ]
    more = fmean(map(round_length, later)) - fmean(explained)
    speeds = replace(speeds, combine_seconds=max(0.0, more))
    if rounds[0].index == 1:
        more = round_length(rounds[0]) - cost.round_seconds(traffic, 1, speeds)
        speeds = replace(speeds, first_round_seconds=max(0.0, more))
    if submitted is not None:
        setup = max(0.0, view.first_started_at - submitted)
        speeds = replace(speeds, setup_seconds=setup)
    return speeds


def message_seconds(view: RunView) -> float:
    """Mean seconds that an exchange took beside its work; 0 if not known.

    With secure aggregation, those of the exchanges that set it up, which do no work.
    """
    found = [
        answer.answered_seconds
        - answer.asked_seconds
        - sum(phase.seconds for phase in answer.phases)
        for row in view.rounds
        if row.index > 1
        for answer in row.reports
        if isinstance(answer, SiteAnswered) and answer.phases
    ]
    steps = {step.value for step in SecureStep}
    found += [
        phase.seconds
        for row in view.rounds
        if row.finished is not None
        for phase in row.finished.phases
        if phase.name in steps
    ]
    return max(0.0, fmean(found)) if found else 0.0


def _of_steps(traffic: Traffic, steps: int | None) -> Traffic:
    """The traffic of a run whose rounds take so many steps; None for the job's."""
    if steps is None:
        return traffic
    training = replace(traffic.job.training, local_steps=steps)
    return replace(traffic, job=replace(traffic.job, training=training))


def _speed_of(
    name: str,
    answers: Sequence[tuple[int, SiteAnswered]],
    traffic: Traffic,
    steps: Mapping[int, int],
) -> SiteSpeed:
    facts = traffic.facts[SiteId(name)]
    bare = SiteSpeed(
        name=name,
        train_examples_per_second=_NO_LIMIT,
        evaluate_examples_per_second=_NO_LIMIT,
        down_bytes_per_second=_NO_LIMIT,
        up_bytes_per_second=_NO_LIMIT,
    )
    works = [(index, _work(answer)) for index, answer in answers]
    train = fmean(work["train"] for _, work in works)
    evaluations = [
        work["evaluate"] / times
        for index, work in works
        if (times := traffic.evaluations(index))
    ]
    evaluate = fmean(evaluations) if evaluations else 0.0
    examples = fmean(
        examples_trained(
            in_round(_of_steps(traffic, steps.get(index)).job, index).training, facts
        )
        for index, _ in answers
    )
    return replace(
        bare,
        train_examples_per_second=max(examples, 1) / max(train, 1e-9),
        evaluate_examples_per_second=max(facts.held_out, 1) / max(evaluate, 1e-9),
    )


def _work(answer: SiteAnswered) -> Mapping[str, float]:
    """Seconds of training and of evaluation."""
    found = {"train": 0.0, "evaluate": 0.0}
    for phase in answer.phases:
        if phase.name in found:
            found[phase.name] += phase.seconds
    if not answer.phases:
        found["train"] = answer.answered_seconds - answer.asked_seconds
    return found
