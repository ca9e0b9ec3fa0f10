"""What the aggregator sends with the model in R1, and the contents of a header.

The header's slots are part of the contract. Losses travel as whole micronats, so
that sums over sites are exact and no slot can wrap.

What a site says in every round of a run alike, its number of examples and of
predictions, would be revealed exactly by the first round without it. Where
rounds may continue without a site, such numbers are on a coarse public grid: see
``privacy.counts``.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from federation.job.metrics import (
    CONFUSION,
    CORRECT,
    MAX_MEAN_LOSS,
    MAX_PREDICTIONS,
    SUBGROUP,
    most_of_a_record,
)
from federation.job.spec import JobSpec
from federation.messages import MetricSums, RoundTask
from federation.vectors import IntegerVector, Words
from privacy.counts import coarse
from privacy.keystream import Mask
from privacy.secagg.agreement.canonical import Reader, fields, float64, lp, u64
from privacy.secagg.agreement.certificate import MAX_CERTIFICATE_BYTES
from privacy.secagg.agreement.contract import MAX_MEMBERS, Contract, Setting
from privacy.secagg.agreement.message import DIGEST_BYTES
from privacy.secagg.arithmetic.header import HeaderSpec, Slot, SlotKind
from privacy.secagg.arithmetic.levels import LevelPlan
from privacy.secagg.arithmetic.ring import UpdateOutOfRange
from privacy.secagg.errors import MalformedMessage
from privacy.secagg.protocol.key_schedule import Stream

MAX_CONFIRMS_BYTES = 16 << 20
_TAG = b"xsa-v2/train"
_LARGEST_COUNT = 1 << 56
_LARGEST_NOISE = 1 << 16
_LARGEST_METRIC = 1 << 24  # of an objective of a user's, summed over a site's records
_MICRO = 1e6
_MOST_LEVELS = 1 << 16
_STEP_BYTES = 4
_MOST_STEPS_BYTES = 16 << 20  # Of a model of 17 billion values.

WEIGHT = "weight"
TRAINING, EVALUATION = "training", "evaluation"
_COUNTS = ("count", "loss", *CORRECT)
_RECALL = re.compile(rf"{EVALUATION}_recall_at_\d+")
# With noise they may be negative; without it, ``aggregator.sum_bounds`` refuses that.
_CELL = re.compile(
    rf"{EVALUATION}_(({CONFUSION}_\d+|auc_(pos|neg)|bin_(count|hits))_\d+|"
    rf"{SUBGROUP}_\d+_(count|correct))"
)
# Where the clip norm follows the updates: +-1/2, with noise.
WITHIN_CLIP = "within_clip"
# Of updates in few levels: values beyond the outermost one; and the sum of the squares
# of what was rounded, in squares of the clip norm.
CLIPPED, ENERGY = "clipped", "energy"
_OF_LEVELS = (CLIPPED, ENERGY)


def slots_of(
    metrics: Iterable[str],
    matrix: Iterable[str] = (),
    *,
    adapts: bool = False,
    levels: bool = False,
) -> tuple[str, ...]:
    """Name the slots of a header.

    Args:
        metrics: Names of the job's metrics.
        matrix: Names of further sums, only over held-out data.
        adapts: Whether the clip norm follows the updates.
        levels: Whether updates are rounded to few levels.
    """
    sums = ("count", "loss", *metrics)
    kinds = (TRAINING, EVALUATION)
    slots = (WEIGHT, *(f"{kind}_{name}" for kind in kinds for name in sums))
    slots = (*slots, *(f"{EVALUATION}_{name}" for name in matrix))
    slots = (*slots, *_OF_LEVELS) if levels else slots
    return (*slots, WITHIN_CLIP) if adapts else slots


HEADER_SLOTS = slots_of(CORRECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBody:
    """What a round's task contains besides the model.

    Attributes:
        setup_hash: h_U of the setup that the round rests on.
        confirms: ``SetupRecord.confirms`` for a site that has not seen them yet,
            otherwise empty.
        certificate: Certificate of the newest round with a sum.
        update_clip: What updates are clipped to in this round, in weight units: the
            contract's clip norm, unless clipping adapts.
        plan: Levels and steps of the updates; None where they are words of the ring.
        divisor: If the task has the words of the newest sum in place of a model, what
            the sum is divided by; otherwise 0.
        steps_by_site: If sites take different numbers of local steps, those of each
            site of the cohort, in the order of their numbers; 0 for a site that is not
            asked.
    """

    setup_hash: bytes
    confirms: bytes
    certificate: bytes
    update_clip: float
    plan: LevelPlan | None = None
    divisor: float = 0.0
    steps_by_site: tuple[int, ...] = ()


def model_digest(weights_d: Words, integers_m: IntegerVector) -> bytes:
    """H(theta_r): SHA-256 of the global model as it is sent, by each party."""
    head = fields(b"xsa-v2/model") + u64(weights_d.size) + u64(integers_m.size)
    digest = hashlib.sha256(head)
    little = weights_d.dtype.newbyteorder("<")
    digest.update(np.ascontiguousarray(weights_d, dtype=little).data)
    digest.update(np.ascontiguousarray(integers_m, dtype="<i8").data)
    return digest.digest()


def task_digest(task: RoundTask, body: TrainBody) -> bytes:
    """task_r: SHA-256 of the work to do with the model; it is part of ctx_r.

    Were the kind of work not in it, an aggregator could have one site train and the
    others evaluate, and read that site's numbers off the sum of the headers. Were
    the clip norm not in it, sites could be made to bring too little noise for each
    other's updates. Were levels and steps not in it, sites would round to different
    grids, and the sum would show whose. Were the local steps not in it, one site could
    be made to train for longer than the others, so that most of the sum is its own.
    Where sites take different numbers of steps, each sees those of all, and compares
    its own.
    Were the state that sites begin with not in it, nor the certificate that settles
    what a site adds of that state, one site could be made to begin with another, and
    the difference of two sums would be its own.
    """
    asked = f"{task.kind.value} {task.evaluate:d} {task.evaluate_after:d}"
    if body.steps_by_site:
        by_site = " ".join(map(str, body.steps_by_site))
        asked += f" by site {task.first_step} {by_site}"
    elif task.num_steps:
        asked += f" {task.num_steps} {task.first_step}"
    if task.counted:
        asked += f" counted {task.counted}"
    settles = []
    if task.state_round or task.state_context:
        asked += f" state {task.state_round} {task.state_context}"
        settles = [body.certificate]
    parts = fields(b"xsa-v2/task", asked.encode(), *settles)
    levels = b"" if body.plan is None else body.plan.digest()
    return hashlib.sha256(parts + float64(body.update_clip) + levels).digest()


def masks(streams: Iterable[Stream]) -> list[Mask]:
    """The streams of a round in the form that the arithmetic takes; not copied."""
    return [Mask(key=stream.key, sign=stream.sign) for stream in streams]


def header_spec(num_sites: int, names: Sequence[str] = HEADER_SLOTS) -> HeaderSpec:
    """The slots that a contract names, in their order.

    Args:
        num_sites: N.
        names: As ``slots_of`` returns them.
    """
    fractions = {WEIGHT: 1, WITHIN_CLIP: _LARGEST_NOISE}
    counts = [f"{kind}_{name}" for kind in (TRAINING, EVALUATION) for name in _COUNTS]
    counts.append(CLIPPED)

    def slot(name: str) -> Slot:
        if name in counts or _RECALL.fullmatch(name):
            return Slot(name=name, kind=SlotKind.COUNT, bound=_LARGEST_COUNT)
        if _CELL.fullmatch(name):
            return Slot(name=name, kind=SlotKind.INTEGER, bound=_LARGEST_COUNT)
        bound = fractions.get(name, _LARGEST_METRIC)
        return Slot(name=name, kind=SlotKind.FRACTION, bound=bound)

    return HeaderSpec(slots=tuple(map(slot, names)), num_sites=num_sites)


def counts_coarsely(contract: Contract) -> bool:
    """Whether sites put their numbers on the grid of ``privacy.counts``.

    They do where sums of one run may be over different sites. Under differential
    privacy numbers are withheld, noised or public anyway.
    """
    return contract.setting is Setting.P2 and contract.differential_privacy.is_none


def coarse_sums(sums: MetricSums | None) -> MetricSums | None:
    """Put the number of predictions on the grid; mean loss and accuracy stay.

    The hits are rounded to whole ones, so that the accuracy is off by half a
    prediction at most.
    """
    if sums is None or sums.count == 0:
        return sums
    return _scaled(sums, coarse(sums.count))


def _scaled(sums: MetricSums, count: int) -> MetricSums:
    factor = count / sums.count
    return MetricSums(
        count=count,
        loss_sum=sums.loss_sum * factor,
        metrics={
            name: round(value * factor) if isinstance(value, int) else value * factor
            for name, value in sums.metrics.items()
        },
    )


def most_evaluated(job: JobSpec) -> int:
    """Most predictions on its held-out data that a site reports; see ``bounded``."""
    most = job.privacy.secure_aggregation.max_examples
    if most is None:
        return coarse(MAX_PREDICTIONS)
    return coarse(most * most_of_a_record(job.training))


def bounded(sums: MetricSums | None, most: int) -> MetricSums | None:
    """Limit the number of predictions that a site's held-out results count for.

    Of a site with more, mean loss and accuracy stay, as on the grid.
    """
    return sums if sums is None or sums.count <= most else _scaled(sums, most)


def write_sums(
    kind: str, sums: MetricSums | None, slots: Sequence[str]
) -> dict[str, float]:
    """Header values of a site's sums; all 0 if there are none.

    Args:
        kind: ``TRAINING`` or ``EVALUATION``.
        sums: What the site reports.
        slots: Slots of the contract.

    Raises:
        UpdateOutOfRange: The loss is not a number that fits, for example NaN.
    """
    if sums is None:
        return dict.fromkeys((s for s in slots if s.startswith(f"{kind}_")), 0)
    loss = sums.loss_sum
    if math.isfinite(loss) and sums.metrics.keys() >= CORRECT.keys():
        # A built-in task; an objective of a user's has bounds of its own.
        loss = min(loss, MAX_MEAN_LOSS * sums.count)
    if not 0 <= loss * _MICRO <= _LARGEST_COUNT:
        raise UpdateOutOfRange(
            f"the {kind} loss is {loss}, which a secure sum cannot hold: remove NaN "
            "and infinite values from this site's records (crossfed check-job finds "
            "them), or lower training.optimizer.lr"
        )
    return {
        f"{kind}_count": sums.count,
        f"{kind}_loss": round(loss * _MICRO),
        **{f"{kind}_{name}": value for name, value in sums.metrics.items()},
    }


def read_sums(kind: str, totals: Mapping[str, float]) -> MetricSums | None:
    """Sums over all sites out of a decoded header; None if nothing was predicted."""
    named = {
        slot.removeprefix(f"{kind}_"): value
        for slot, value in totals.items()
        if slot.startswith(f"{kind}_")
    }
    count, loss = int(named.pop("count")), named.pop("loss")
    if count == 0:
        return None
    return MetricSums(count=count, loss_sum=loss / _MICRO, metrics=named)


def write_train(body: TrainBody) -> bytes:
    """Encode a round's ``TrainBody``."""
    head = fields(_TAG, body.setup_hash, body.confirms, body.certificate)
    levels, steps = 0, b""
    if body.plan is not None:
        levels = body.plan.levels
        steps = body.plan.steps_b.astype("<f4", copy=False).tobytes()
    plan = u64(levels) + lp(steps)
    data = head + float64(body.update_clip) + plan + float64(body.divisor)
    if body.steps_by_site:
        data += u64(len(body.steps_by_site)) + b"".join(map(u64, body.steps_by_site))
    return data


def read_train(data: bytes) -> TrainBody:
    """Decode ``write_train``.

    Raises:
        MalformedMessage: The bytes are something else.
    """
    reader = Reader(data, _TAG)
    body = TrainBody(
        setup_hash=reader.field("setup_hash", size=DIGEST_BYTES),
        confirms=reader.field("confirms", limit=MAX_CONFIRMS_BYTES),
        certificate=reader.field("certificate", limit=MAX_CERTIFICATE_BYTES),
        update_clip=reader.float64("update_clip"),
        plan=_read_plan(reader),
        divisor=reader.float64("divisor"),
        steps_by_site=_read_steps_by_site(reader),
    )
    reader.end()
    if body.update_clip <= 0:
        raise MalformedMessage(f"a clip norm of {body.update_clip} is not positive")
    if body.divisor < 0:
        raise MalformedMessage(f"a divisor of {body.divisor} is not positive")
    return body


def _read_steps_by_site(reader: Reader) -> tuple[int, ...]:
    if reader.is_at_end:
        return ()
    count = reader.u64("count of steps_by_site", low=1, high=MAX_MEMBERS)
    return tuple(reader.u64("steps_by_site") for _ in range(count))


def _read_plan(reader: Reader) -> LevelPlan | None:
    levels = reader.u64("levels", high=_MOST_LEVELS)
    steps = reader.field("steps", limit=_MOST_STEPS_BYTES)
    if not levels and not steps:
        return None
    if not levels or not steps or len(steps) % _STEP_BYTES:
        raise MalformedMessage(f"{len(steps)} bytes are no steps of {levels} levels")
    try:
        steps_b = np.frombuffer(steps, "<f4").astype(np.float32)
        return LevelPlan(levels=levels, steps_b=steps_b)
    except ValueError as error:
        raise MalformedMessage(str(error)) from None
