"""Translate tasks to an existing Flower app, and its answers back; no I/O.

A task becomes a record of arrays under the names of the model's tensors, in their
order, and a record of settings, as Flower's own FedAvg sends them. What comes back is
hostile: names, shapes, types, sizes and numbers are checked before they are used, and
no array is read by anything that could allocate more than it should hold.

Shape suffixes: d float values of the model, m integer values of the model.
"""

import math
from collections.abc import Mapping
from io import BytesIO
from tokenize import TokenError
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from federation.errors import InvalidUpdate
from federation.job.flower_app_job import ROUND, FlowerAppSpec
from federation.job.metrics import CORRECT, Metric
from federation.job.spec import TrainingSpec
from federation.messages import MetricSums, RoundTask, SiteEvaluation, SiteUpdate
from federation.vectors import AVERAGED, IntegerVector, Layout, Role, TensorSpec, Vector

# As ``aggregator.weighting`` believes them.
MAX_EXAMPLES = 10**9
# Of the header of an array in NumPy's format; NumPy's own limit for unsafe ones.
MAX_HEADER_BYTES = 10_000

MAX_LENGTH = 2**63  # Python refuses to print far larger numbers.

_NUMPY = "numpy.ndarray"  # The only serialisation that Flower has.
_PREAMBLE_BYTES = 12  # Magic, version and the header's length, in format 2.
_FLOATS = frozenset({"float16", "float32", "float64"})
# By the kinds of NumPy: what a tensor may come back as.
_FLOATING, _INTEGER = "f", "iub"
# What NumPy raises for bytes that are none; a header is a literal of Python.
_NO_HEADER = (
    *(ValueError, TypeError, SyntaxError, TokenError),
    *(RecursionError, MemoryError),
)
_MAX_NAMES = 3  # of a list in a message


def settings_of(
    spec: FlowerAppSpec, training: TrainingSpec
) -> Mapping[str, bool | int | float | str]:
    """What the record of settings says beside the round: the job's, then the site's."""
    wanted = {
        "lr": training.optimizer.lr,
        "batch-size": training.batch_size,
        "local-steps": training.local_steps,
        "local-epochs": training.local_epochs,
    }
    known = {name: value for name, value in wanted.items() if value is not None}
    return {**known, **spec.settings}


def instruction(
    task: RoundTask,
    layout: Layout,
    spec: FlowerAppSpec,
    settings: Mapping[str, bool | int | float | str],
) -> RecordDict:
    """Write a task in Flower's format.

    A type that NumPy lacks (``bfloat16``) travels as float32. Integers that each site
    keeps to itself are those that the model began with.

    Args:
        task: Weights are float32, shape ``(d,)``; integers int64, shape ``(m,)``.
        layout: Layout of the run's model.
        spec: The app's names.
        settings: See ``settings_of``.
    """
    views: dict[str, NDArray[Any]] = {
        **{t.name: view for t, view in layout.float_views(task.weights_d)},
        **{t.name: view for t, view in layout.integer_views(task.integers_m)},
    }
    arrays = ArrayRecord(
        {t.name: Array(views[t.name].astype(_sent_type(t))) for t in layout.tensors}
    )
    config: dict[str, Any] = {ROUND: task.round_index, **settings}
    return RecordDict({spec.arrays: arrays, spec.config: ConfigRecord(config)})


def read_update(
    content: RecordDict,
    task: RoundTask,
    layout: Layout,
    spec: FlowerAppSpec,
    evaluation: MetricSums | None,
    *,
    wanted: Mapping[str, Metric] = CORRECT,
) -> SiteUpdate:
    """Read an app's answer to training.

    Args:
        content: What it sent.
        task: What it answers.
        layout: Layout of the run's model.
        spec: The app's names.
        evaluation: Of the global weights, from its other answer; None if not asked.
        wanted: The job's metrics.

    Raises:
        InvalidUpdate: It is not such an answer; the message says what is wrong.
    """
    record = content.array_records.get(spec.arrays)
    if record is None:
        raise InvalidUpdate(
            f"its answer has no record of arrays {spec.arrays!r}, only "
            f"{_names(content)}: set flower_app.arrays to the app's name for it"
        )
    delta_d, integers_m = _read_arrays(record, layout)
    np.subtract(delta_d, task.weights_d, out=delta_d)
    integers_m[layout.integer_mask(Role.KEEP)] = 0  # As all sites send them.
    metrics = _metrics(content, spec)
    num_examples = _count(metrics, spec.num_examples)
    return SiteUpdate(
        run_id=task.run_id,
        round_index=task.round_index,
        site=task.site,
        layout_digest=layout.digest,
        delta_d=delta_d,
        integers_m=integers_m,
        num_examples=num_examples,
        num_steps=0,  # It does not tell.
        training=_training(metrics, spec, num_examples, wanted),
        evaluation=evaluation,
        evaluation_after=None,
        phases=(),
        based_on=task.based_on,
        fragment=task.fragment,
    )


def read_evaluation(
    content: RecordDict,
    task: RoundTask,
    spec: FlowerAppSpec,
    *,
    wanted: Mapping[str, Metric] = CORRECT,
) -> SiteEvaluation:
    """Read an app's answer to evaluation; ``wanted`` are the job's metrics.

    Raises:
        InvalidUpdate: It is not such an answer; the message says what is wrong.
    """
    metrics = _metrics(content, spec)
    count = _count(metrics, spec.num_examples)
    sums: dict[str, int | float] = {}
    for name, metric in wanted.items():
        if name in CORRECT:
            sums[name] = round(_fraction(metrics, spec.eval_accuracy) * count)
        else:
            sums[name] = _mean(metrics, name, metric) * count
    return SiteEvaluation(
        run_id=task.run_id,
        round_index=task.round_index,
        site=task.site,
        evaluation=MetricSums(
            count=count,
            loss_sum=_number(metrics, spec.eval_loss) * count,
            metrics=sums,
        ),
        phases=(),
        based_on=task.based_on,
        fragment=task.fragment,
    )


def _sent_type(tensor: TensorSpec) -> np.dtype[Any]:
    if tensor.role not in AVERAGED:
        return np.dtype(tensor.dtype)
    return np.dtype(tensor.dtype if tensor.dtype in _FLOATS else "float32")


def _read_arrays(record: ArrayRecord, layout: Layout) -> tuple[Vector, IntegerVector]:
    expected = {tensor.name for tensor in layout.tensors}
    numbers = [str(place) for place in range(len(layout.tensors))]
    if list(record) == numbers and expected != set(numbers):
        # From a list of arrays, as apps without torch make it: Flower numbers them.
        names = (tensor.name for tensor in layout.tensors)
        record = ArrayRecord(dict(zip(names, record.values(), strict=True)))
    missing, strange = expected - record.keys(), record.keys() - expected
    if missing or strange:
        raise InvalidUpdate(
            "its model differs from this run's: "
            + "; ".join(
                f"{what} {_some(names)}"
                for what, names in (("it lacks", missing), ("it adds", strange))
                if names
            )
        )
    weights_d = np.empty(layout.size, dtype=np.float32)
    integers_m = np.empty(layout.num_integers, dtype=np.int64)
    with np.errstate(over="ignore"):  # Whether values are finite is looked at later.
        for tensor, view in layout.float_views(weights_d):
            view[...] = _read_array(record[tensor.name], tensor, _FLOATING)
    for tensor, place in layout.integer_views(integers_m):
        # A number of 64 bits without sign wraps: it is a site's own nonsense.
        place[...] = _read_array(record[tensor.name], tensor, _INTEGER).astype(np.int64)
    return weights_d, integers_m


def _read_array(array: Array, tensor: TensorSpec, kinds: str) -> NDArray[Any]:
    """Read NumPy's format; the header's claims are checked before use."""
    where = f"its tensor {tensor.name!r}"
    if array.stype != _NUMPY:
        raise InvalidUpdate(f"{where} is serialised as {array.stype!r:.40}")
    stream = BytesIO(array.data[: MAX_HEADER_BYTES + _PREAMBLE_BYTES])
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else _read_header_2
        shape, by_columns, dtype = read(stream, max_header_size=MAX_HEADER_BYTES)
    except _NO_HEADER as error:
        raise InvalidUpdate(f"{where} is not a NumPy array: {error!s:.100}") from error
    if shape != tensor.shape:
        shown = ascii([min(length, MAX_LENGTH) for length in shape])[:60]
        raise InvalidUpdate(f"{where} has shape {shown}, not {list(tensor.shape)}")
    if dtype.kind not in kinds or dtype.hasobject:
        raise InvalidUpdate(f"{where} is of type {dtype!s:.40}, not {tensor.dtype}")
    size = len(array.data) - stream.tell()
    if size != tensor.size * dtype.itemsize:
        raise InvalidUpdate(
            f"{where} has {size} bytes, not {tensor.size * dtype.itemsize}"
        )
    values = np.frombuffer(array.data, dtype, offset=stream.tell())
    return values.reshape(shape, order="F" if by_columns else "C")


def _read_header_2(
    stream: BytesIO, *, max_header_size: int
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    # Format 3 is for names of fields, which no tensor has.
    return npy.read_array_header_2_0(stream, max_header_size=max_header_size)


def _metrics(content: RecordDict, spec: FlowerAppSpec) -> MetricRecord:
    record = content.metric_records.get(spec.metrics)
    if record is None:
        raise InvalidUpdate(
            f"its answer has no record of metrics {spec.metrics!r}, only "
            f"{_names(content)}: set flower_app.metrics to the app's name for it"
        )
    return record


def _training(
    metrics: MetricRecord,
    spec: FlowerAppSpec,
    num_examples: int,
    wanted: Mapping[str, Metric],
) -> MetricSums | None:
    if not spec.train_loss:
        return None
    loss = _number(metrics, spec.train_loss)
    # It does not report how many predictions were right; that is not used.
    sums: dict[str, int | float] = {
        name: 0 if name in CORRECT else _mean(metrics, name, metric) * num_examples
        for name, metric in wanted.items()
    }
    return MetricSums(count=num_examples, loss_sum=loss * num_examples, metrics=sums)


def _fraction(metrics: MetricRecord, name: str) -> float:
    value = _number(metrics, name)
    if not 0.0 <= value <= 1.0:
        raise InvalidUpdate(
            f"its metric {name!r} is {value!r:.40}, not a fraction from 0 to 1"
        )
    return value


def _mean(metrics: MetricRecord, name: str, metric: Metric) -> float:
    """Mean of one of the job's metrics, within its bounds."""
    value = _number(metrics, name)
    if not math.isfinite(value):
        raise InvalidUpdate(f"its metric {name!r} is {value!r:.40}, not finite")
    return min(max(value, metric.low), metric.high)


def _count(metrics: MetricRecord, name: str) -> int:
    value = _number(metrics, name)
    if not (1 <= value <= MAX_EXAMPLES and value == math.floor(value)):
        raise InvalidUpdate(
            f"its metric {name!r} is {value!r:.40}, not a number of examples from 1 "
            f"to {MAX_EXAMPLES}"
        )
    return int(value)


def _number(metrics: MetricRecord, name: str) -> float:
    """A metric; a loss may be NaN, as a model that diverged is honest about it."""
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        have = ", ".join(sorted(repr(key)[:40] for key in metrics)[:_MAX_NAMES])
        raise InvalidUpdate(
            f"its metrics have no number {name!r}, only {have or 'nothing'}: correct "
            "the names of the app's metrics in the job's flower_app"
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _names(content: RecordDict) -> str:
    return _some(set(content)) if content else "nothing"


def _some(names: set[str]) -> str:
    shown = ", ".join(repr(name)[:60] for name in sorted(names)[:_MAX_NAMES])
    return shown + (", ..." if len(names) > _MAX_NAMES else "")
