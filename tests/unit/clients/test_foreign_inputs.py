"""Data and gradients as users of other libraries have them: each works, or is named."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_model, save_file
from support.small_jobs import blobs, small_job
from torch import nn
from torch.utils.data import DataLoader

from clients.data import Examples, as_dataset
from clients.models import weights
from clients.models.model_pool import ModelPool
from clients.training.trainer import TorchTrainer
from federation.errors import SiteError
from federation.ids import SiteId
from federation.protocols import LocalWeights

X = np.arange(12, dtype=np.float32).reshape(6, 2) / 8
Y = np.arange(6) % 3
T = torch.from_numpy(X)
WANTED = torch.from_numpy(X[[1, 4]])


class Column:
    """As of pandas or polars, which need not be installed: only what is read of it."""

    def __init__(self, values: Any, dtype: str = "") -> None:
        self.values = values
        self.dtype = dtype or values.dtype

    def to_numpy(self) -> Any:
        return self.values


class Frame:
    """As of pandas: columns that differ in type make a matrix of objects."""

    def __init__(self, **columns: Column) -> None:
        self.of = columns
        self.columns = list(columns)

    def __getitem__(self, name: str) -> Column:
        return self.of[name]

    def to_numpy(self) -> Any:
        matrix = np.empty((6, len(self.of)), object)
        for place, column in enumerate(self.of.values()):
            matrix[:, place] = column.values
        return matrix


def objects(values: Any) -> Any:
    found = np.empty(6, object)
    found[:] = list(values)
    return found


def frame(second: Any, dtype: str = "") -> Frame:
    return Frame(age=Column(X[:, 0]), weight=Column(second, dtype))


def items(make: Callable[[int], Any]) -> list[Any]:
    return [make(i) for i in range(6)]


class Pair(NamedTuple):
    x: Any
    y: int


def masked(*, row: int | None = None) -> Any:
    mask = np.zeros(X.shape, bool)
    if row is not None:
        mask[row, 1] = True
    return np.ma.masked_array(X, mask=mask, fill_value=1e20)


READ: dict[str, Any] = {
    "frame of float and bool": (frame(X[:, 1] > 0.5), Y),
    "frame of nullable numbers without a gap": (frame(objects(X[:, 1])), Y),
    "column of nullable integers": (X, Column(objects(Y.tolist()), "Int64")),
    "masked array without a mask": (masked(), Y),
    "float16": (T.half(), Y),
    "bfloat16": (T.bfloat16(), Y),
    "float8": (T.to(torch.float8_e4m3fn), Y),
    "tensor with a gradient": (T.clone().requires_grad_(), Y),
    "items of lists": items(lambda i: (X[i].tolist(), int(Y[i]))),
    "pairs that are lists": items(lambda i: [X[i].tolist(), int(Y[i])]),
    "items of numbers of NumPy": items(lambda i: (list(X[i]), Y[i])),
    "rows of Hugging Face": items(lambda i: {"x": X[i].tolist(), "label": int(Y[i])}),
    "pairs with names": items(lambda i: Pair(X[i].tolist(), int(Y[i]))),
    "items of float8": items(lambda i: (T[i].to(torch.float8_e4m3fn), int(Y[i]))),
}


@pytest.mark.parametrize("name", READ)
def test_foreign_data_is_read(name: str):
    inputs, targets = as_dataset(READ[name], name="train").batch(np.array([1, 4]))
    values = inputs["x"] if isinstance(inputs, dict) else inputs
    wanted = WANTED.clone()
    if "bool" in name:
        wanted[:, 1] = (wanted[:, 1] > 0.5).float()
    torch.testing.assert_close(values, wanted, atol=0.05, rtol=0)
    assert targets.tolist() == [1, 1]


def sparse_rows(rows: list[int]) -> Any:
    return T[: len(rows)].to_sparse(), torch.zeros(len(rows))


dates = np.arange(6).astype("datetime64[D]")
NAMED: dict[str, tuple[Callable[[], Any], str]] = {
    "date in a frame": (lambda: (frame(dates), Y), "'weight' holds datetime64.* date"),
    "category in a frame": (
        lambda: (frame(objects("abcabc"), "category"), Y),
        "'weight' holds category.*each text",
    ),
    "gap in a nullable column": (
        lambda: (frame(objects([1, 2, None, 4, 5, 6]), "Int64"), Y),
        r"'weight' holds Int64.*missing value",
    ),
    "gap in columns by name": (
        lambda: {"age": objects([1, 2, None, 4, 5, 6]), "label": Y},
        r"inputs\['age'\].*missing value",
    ),
    "text in a column": (lambda: (X, Column(objects("abcabc"))), "targets .*not text"),
    "masked array": (lambda: (masked(row=2), Y), "inputs is a masked array.*filled"),
    "masked column": (
        lambda: {"a": X, "b": masked(row=2), "label": Y},
        r"inputs\['b'\] is a masked array",
    ),
    "masked examples": (
        lambda: Examples(inputs=masked(row=2), targets=Y),
        "inputs is a masked array",
    ),
    "masked item": (
        lambda: items(lambda i: (masked(row=0)[i], 1)),
        "inputs of each item of train is a masked array",
    ),
    "masked later item": (
        lambda: items(lambda i: (masked(row=4)[i], 1)),
        "a record is a masked array",
    ),
    "sparse": (lambda: ({"a": T.to_sparse()}, Y), r"inputs\['a'\] is a sparse.*dense"),
    "sparse rows": (lambda: (T.to_sparse_csr(), Y), "inputs is a sparse"),
    "quantized": (
        lambda: (torch.quantize_per_tensor(T, 0.1, 0, torch.quint8), Y),
        "inputs is a quantized",
    ),
    "nested": (
        lambda: (torch.nested.nested_tensor([*T]), Y),
        "inputs is a nested tensor.*padded",
    ),
    "on the meta device": (lambda: (T.to("meta"), Y), "inputs has no values"),
    "complex": (lambda: (X, T.to(torch.complex64).conj()), "targets is complex"),
    "sparse item": (
        lambda: items(lambda i: (T[i].to_sparse(), 1)),
        "inputs of each item of train is a sparse",
    ),
    "text in an item": (
        lambda: items(lambda i: {"x": X[i], "path": f"{i}.png", "label": 1}),
        r"inputs\['path'\] of each item of train is a str",
    ),
    "object in an item": (
        lambda: items(lambda i: {"x": {"image": SimpleNamespace()}, "label": i}),
        r"inputs\['x'\]\['image'\] of each item of train is a SimpleNamespace",
    ),
    "lists of different lengths": (
        lambda: items(lambda i: ([1] * (i + 1), 1)),
        "pad or crop",
    ),
    "sparse batch of a collate_fn": (
        lambda: DataLoader([1] * 6, collate_fn=sparse_rows),  # type: ignore[arg-type]
        "collate_fn of train returned is a sparse",
    ),
}


@pytest.mark.filterwarnings("ignore:.*(in beta state|prototype stage|deprecated)")
@pytest.mark.parametrize("name", NAMED)
def test_foreign_data_that_cannot_be_read_is_named(name: str):
    """By its column, entry or place, with what to do."""
    make, message = NAMED[name]
    with pytest.raises((SiteError, ValueError), match=message):
        as_dataset(make(), name="train").batch(np.arange(6))


class Words(nn.Module):
    """Its gradients of the table are sparse, or not."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().mul(3).long().clamp(max=8)).sum(1)


SPARSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "proximal": {"proximal_mu": 0.1},
    "clipped": {"clip_grad_norm": 0.1},
    "control variates": {"control_variates": True},
    "FedDyn": {"dynamic_alpha": 0.1},
    "fp16": {"precision": "fp16"},
    "momentum": {"optimizer": {"lr": 0.5, "momentum": 0.9, "state": "keep"}},
    "weight decay": {"optimizer": {"lr": 0.5, "weight_decay": 0.1}},
    "adam": {"optimizer": {"name": "adam", "lr": 0.1}},
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_are_steps_of_dense_ones(name: str):
    data = as_dataset(blobs()[0], name="train")
    found = []
    for sparse in (False, True):
        model = {"factory": f"{__name__}:Words", "options": {"sparse": sparse}}
        training = {"local_steps": 3, "optimizer": {"lr": 0.5}, **SPARSE[name]}
        step = {"name": "running_sum" if name == "FedDyn" else "average"}
        aggregation = {"server_optimizer": step}
        job = small_job(model=model, training=training, aggregation=aggregation)
        pool = ModelPool(job)
        trainer = TorchTrainer(
            job, SiteId("site-0"), pool=pool, train=data, held_out=data
        )
        found.append(trainer.fit(*pool.initial_weights(), round_index=1))
    one, other = found
    assert isinstance(one, LocalWeights)
    assert isinstance(other, LocalWeights)
    np.testing.assert_allclose(one.weights_d, other.weights_d, atol=1e-6)
    assert one.kept.keys() == other.kept.keys()


def test_an_optimiser_for_sparse_gradients_gets_them():
    model = {"factory": f"{__name__}:Words", "options": {"sparse": True}}
    optimizer = {"name": "torch.optim:SparseAdam", "lr": 0.1}
    job = small_job(model=model, training={"local_steps": 2, "optimizer": optimizer})
    pool, data = ModelPool(job), as_dataset(blobs()[0], name="train")
    trainer = TorchTrainer(job, SiteId("site-0"), pool=pool, train=data, held_out=data)
    start_d, start_m = pool.initial_weights()
    result = trainer.fit(start_d, start_m, round_index=1)
    assert isinstance(result, LocalWeights)
    assert (result.weights_d != start_d).any()


def test_a_saved_model_with_tied_weights_is_loaded_as_the_page_says(tmp_path: Any):
    """Each memory is stored once; ``load_state_dict`` would miss the other name."""

    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    trained, fresh = tied(), tied()
    state, layout = trained.state_dict(), weights.layout_of(trained, {})
    path = tmp_path / "model.safetensors"
    save_file({spec.name: state[spec.name] for spec in layout.tensors}, path)
    missing, unexpected = load_model(fresh, path)
    assert not [*missing, *unexpected]
    assert fresh[1].weight is fresh[0].weight
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, state[name])
