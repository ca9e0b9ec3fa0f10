"""Tasks in Flower's words and back; answers of apps are hostile."""

import contextlib
import importlib.util
import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from support import toy

from cloud_adapters.flower import simulation as flower_simulation
from federation.errors import InvalidUpdate
from federation.ids import SiteId
from federation.job.flower_app_job import FlowerAppSpec
from federation.job.metrics import Metric
from federation.job.spec import OptimizerSpec, TrainingSpec
from federation.messages import MetricSums, RoundTask, TaskKind
from federation.vectors import Layout, Role

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict  # noqa: E402

from cloud_adapters.flower import records as flower_records  # noqa: E402

pytestmark = pytest.mark.flower

SPEC = FlowerAppSpec()
LAYOUT = Layout.build(
    [
        ("weight", (2, 3), "float32", Role.PARAMETER),
        ("half", (2,), "bfloat16", Role.PARAMETER),
        ("scale", (), "float64", Role.BUFFER),
        ("batches", (), "int64", Role.MAX),
        ("own", (2,), "int32", Role.KEEP),
        ("flag", (1,), "bool", Role.FROM_SERVER),
    ]
)
TASK = RoundTask(
    run_id=toy.RUN,
    round_index=4,
    site=SiteId("lab"),
    kind=TaskKind.TRAIN,
    layout_digest=LAYOUT.digest,
    weights_d=np.arange(9, dtype=np.float32) / 4,
    integers_m=np.array([7, 1, 2, 1], dtype=np.int64),
    evaluate=True,
    evaluate_after=False,
)
METRICS = {"num-examples": 5, "train_loss": 0.5, "eval_loss": 2.0, "eval_acc": 0.4}


def sent() -> RecordDict:
    """The task as an app gets it."""
    return flower_records.instruction(TASK, LAYOUT, SPEC, {"lr": 0.1})


def answer(arrays: Any = None, **metrics: Any) -> RecordDict:
    """What an app sends that gives the model back, with other metrics."""
    numbers = {k: v for k, v in {**METRICS, **metrics}.items() if v is not None}
    return RecordDict(
        {
            "arrays": sent()["arrays"] if arrays is None else arrays,
            "metrics": MetricRecord(numbers),
        }
    )


def read(content: RecordDict, task: RoundTask = TASK, spec: FlowerAppSpec = SPEC):
    """Read an answer to training."""
    return flower_records.read_update(content, task, LAYOUT, spec, None)


def with_tensor(name: str, array: Array) -> RecordDict:
    """An answer with another array under one name."""
    return answer(ArrayRecord({**sent()["arrays"], name: array}))


def refusal(content: RecordDict) -> str:
    """Why an answer is refused."""
    with pytest.raises(InvalidUpdate) as caught:
        read(content)
    return str(caught.value)


def npy(header: str, data: bytes = b"", magic: bytes = b"\x93NUMPY\x01\x00") -> Array:
    """An array with a header that NumPy did not write."""
    text = header.encode()
    raw = magic + len(text).to_bytes(2, "little") + text + data
    return Array("float32", (2, 3), "numpy.ndarray", raw)


def test_model_comes_as_named_tensors():
    """In the model's order, with its shapes and types, as torch reads them."""
    arrays = sent()["arrays"]
    assert list(arrays) == [t.name for t in LAYOUT.tensors]
    state = arrays.to_torch_state_dict()
    assert state["weight"].tolist() == [[0, 0.25, 0.5], [0.75, 1, 1.25]]
    assert state["half"].dtype is torch.float32  # NumPy knows no bfloat16.
    assert state["scale"].dtype is torch.float64
    assert state["scale"].shape == ()
    assert state["batches"].item() == 7
    assert state["own"].tolist() == [1, 2]
    assert state["flag"].tolist() == [True]


def test_settings_are_those_of_the_job_and_the_site():
    """As Flower's FedAvg sends them; the site's go before the job's."""
    training = TrainingSpec(local_steps=3, optimizer=OptimizerSpec(lr=0.25))
    spec = replace(SPEC, settings={"lr": 1.0, "mode": "fast"})
    found = flower_records.settings_of(spec, training)
    assert found == {"lr": 1.0, "batch-size": 32, "local-steps": 3, "mode": "fast"}
    content = flower_records.instruction(TASK, LAYOUT, spec, found)
    assert dict(content["config"]) == {**found, "server-round": 4}


def test_update_is_what_the_app_changed():
    """Local minus global, in float32; integers as they came, a site's own blank."""
    state = sent()["arrays"].to_torch_state_dict()
    state["weight"] += 2
    state["batches"] += 1
    update = read(answer(ArrayRecord(state)))
    assert update.delta_d.tolist() == [2.0] * 6 + [0.0] * 3
    assert update.delta_d.dtype == np.float32
    assert update.integers_m.tolist() == [8, 0, 0, 1]
    assert (update.site, update.round_index) == ("lab", 4)
    assert update.layout_digest == LAYOUT.digest
    assert update.num_examples == 5
    assert update.training == MetricSums(count=5, loss_sum=2.5, metrics={"correct": 0})


def test_list_of_arrays_is_taken_in_order():
    """Apps without torch send one: Flower numbers its entries."""
    arrays = sent()["arrays"].to_numpy_ndarrays()
    update = read(answer(ArrayRecord([np.array(array + array) for array in arrays])))
    assert np.array_equal(update.delta_d, TASK.weights_d)


def test_order_of_columns_does_not_matter():
    """NumPy writes a transposed matrix column by column."""
    weight = np.asfortranarray(TASK.weights_d[:6].reshape(2, 3))
    assert not read(with_tensor("weight", Array(weight))).delta_d.any()


def test_evaluation_is_turned_into_sums():
    """So that metrics of several sites add up."""
    found = flower_records.read_evaluation(answer(), TASK, SPEC)
    assert found.evaluation == MetricSums(
        count=5, loss_sum=10.0, metrics={"correct": 2}
    )


def test_metrics_of_a_regression_are_read_by_their_names():
    """As means, within the job's bounds; accuracy is not asked for."""
    wanted = {
        "absolute_error": Metric(low=0.0, high=1.0),
        "squared_error": Metric(),
    }
    spec = replace(SPEC, eval_accuracy="", train_loss="")
    content = answer(absolute_error=3.0, squared_error=9.0, eval_acc=None)
    found = flower_records.read_evaluation(content, TASK, spec, wanted=wanted)
    assert found.evaluation.metrics == {"absolute_error": 5.0, "squared_error": 45.0}
    update = flower_records.read_update(
        content, TASK, LAYOUT, spec, None, wanted=wanted
    )
    assert update.training is None
    for name, value in (("squared_error", None), ("absolute_error", math.nan)):
        other = answer(**{"absolute_error": 3.0, "squared_error": 9.0, name: value})
        with pytest.raises(InvalidUpdate, match=name):
            flower_records.read_evaluation(other, TASK, spec, wanted=wanted)


def test_app_without_training_loss():
    """The job says so, and the round's loss is that of the others."""
    spec = replace(SPEC, train_loss="")
    assert read(answer(train_loss=None), spec=spec).training is None


def test_diverged_loss_is_told():
    """NaN is an honest answer."""
    training = read(answer(train_loss=math.nan)).training
    assert training is not None
    assert math.isnan(training.loss)


@pytest.mark.parametrize(
    ("metrics", "complaint"),
    [
        ({"num-examples": None}, "have no number 'num-examples', only 'eval_acc'"),
        ({"num-examples": 0}, "'num-examples' is 0.0, not a number"),
        ({"num-examples": -3}, "is -3.0, not a number"),
        ({"num-examples": 2.5}, "is 2.5, not a number"),
        ({"num-examples": 10**9 + 1}, "is 1000000001.0, not a number"),
        ({"num-examples": math.nan}, "is nan, not a"),
        ({"num-examples": [1, 2]}, "have no number 'num-examples'"),
        ({"train_loss": None}, "have no number 'train_loss'"),
    ],
)
def test_metrics_that_cannot_be_are_refused(metrics: dict[str, Any], complaint: str):
    """The message names the metric."""
    assert complaint in refusal(answer(**metrics))


@pytest.mark.parametrize("accuracy", [-0.1, 1.1, math.nan, math.inf])
def test_accuracy_is_a_fraction(accuracy: float):
    """Or hits would outnumber examples."""
    with pytest.raises(InvalidUpdate, match="not a fraction from 0 to 1"):
        flower_records.read_evaluation(answer(eval_acc=accuracy), TASK, SPEC)


def test_records_of_other_names_are_told():
    """With the key to set."""
    other = RecordDict({"model": sent()["arrays"], "metrics": MetricRecord(METRICS)})
    assert "no record of arrays 'arrays', only 'metrics', 'model'" in refusal(other)
    bare = RecordDict({"arrays": sent()["arrays"]})
    assert "no record of metrics 'metrics', only 'arrays'" in refusal(bare)
    assert "only nothing: set flower_app.arrays" in refusal(RecordDict())


def test_another_model_is_refused():
    """The message names tensors."""
    arrays = sent()["arrays"]
    arrays["extra"] = arrays.pop("half")
    assert "it lacks 'half'; it adds 'extra'" in refusal(answer(arrays))
    assert "it lacks 'batches'" in refusal(answer(ArrayRecord({})))


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (Array(np.zeros((3, 2), np.float32)), "has shape [3, 2], not [2, 3]"),
        (Array(np.zeros((2, 3), np.int64)), "is of type int64, not float32"),
        (Array(np.zeros((2, 3), "complex64")), "is of type complex64, not float32"),
        (Array("float32", (2, 3), "torch", b""), "is serialised as 'torch'"),
        (Array("float32", (2, 3), "numpy.ndarray", b""), "is not a NumPy array"),
        (
            Array("float32", (2, 3), "numpy.ndarray", b"\x80\x04N."),
            "is not a NumPy array",
        ),
        (npy("{'descr':'|O','fortran_order':False,'shape':(2,3)}"), "of type object"),
        (npy("{'descr':'<f4','fortran_order':False,'shape':(2,3)}"), "has 0 bytes"),
        (
            npy("{'descr':'<f4','fortran_order':False,'shape':(9**99,)}"),
            "is not a NumPy array",
        ),
        (
            npy(f"{{'descr':'<f4','fortran_order':False,'shape':(0x{'f' * 4000},)}}"),
            "has shape [9223372036854775808], not [2, 3]",
        ),
        (npy("(" * 3000), "is not a NumPy array"),
        (npy("__import__('os').abort()"), "is not a NumPy array"),
    ],
)
def test_array_is_checked_before_it_is_read(array: Array, complaint: str):
    """A header may claim anything; nothing is allocated by it."""
    found = refusal(with_tensor("weight", array))
    assert complaint in found
    assert "tensor 'weight'" in found


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_what_is_not_finite_is_left_to_the_round(value: float):
    """The round refuses it as it does for every site: it must only survive."""
    arrays = sent()["arrays"]
    arrays["scale"] = Array(np.array(value))
    assert not np.isfinite(read(answer(arrays)).delta_d[8])


def damaged(data: bytes, place: int, more: bytes) -> bytes:
    """Overwrite a piece."""
    return data[:place] + more + data[place + len(more) :]


@given(place=st.integers(0, 140), more=st.binary(max_size=40), cut=st.integers(0, 200))
@settings(max_examples=300, deadline=None)
@example(place=10, more=b"{'descr':", cut=200)
def test_damaged_array_is_refused_or_read(place: int, more: bytes, cut: int):
    """Whatever the bytes are, nothing but our own error comes of them."""
    buffer = io.BytesIO()
    np.save(buffer, np.ones((2, 3), dtype=np.float32))
    raw = damaged(buffer.getvalue(), place, more)[:cut]
    content = with_tensor("weight", Array("float32", (2, 3), "numpy.ndarray", raw))
    with contextlib.suppress(InvalidUpdate):
        assert read(content).delta_d.shape == (LAYOUT.size,)


TENSORS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from(["float16", "float32", "float64", "bfloat16"]),
    ),
    min_size=1,
    max_size=4,
)


@given(tensors=TENSORS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_model_comes_back_as_it_went(tensors: list[Any], data: st.DataObject):
    """An app that changes nothing has an update of nothing, whatever the layout."""
    rows = [
        (f"t{i}", shape, kind, Role.BUFFER) for i, (shape, kind) in enumerate(tensors)
    ]
    layout = Layout.build([("first", (1,), "float32", Role.PARAMETER), *rows])
    values = data.draw(
        st.lists(st.floats(-8, 8, width=16), min_size=layout.size, max_size=layout.size)
    )
    task = replace(
        TASK,
        weights_d=np.array(values, dtype=np.float32),
        integers_m=np.zeros(0, dtype=np.int64),
    )
    content = flower_records.instruction(task, layout, SPEC, {})
    content["metrics"] = MetricRecord(METRICS)
    update = flower_records.read_update(content, task, layout, SPEC, None)
    assert not update.delta_d.any()
    assert update.delta_d.shape == (layout.size,)
