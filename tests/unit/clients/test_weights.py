"""A module as flat vectors, and back."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from support.examples import few
from torch import nn

from clients.models import weights
from federation.errors import JobError, LayoutMismatch
from federation.vectors import Layout, Role

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


class Bag(nn.Module):
    """Parameters and buffers, whatever they are."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def layout_of(module: nn.Module, **roles: str):
    return weights.layout_of(module, roles)


def roles_of(layout: Layout):
    return {t.name: t.role for t in layout.tensors}


def filled(layout: Layout):
    """Vectors of different small values, not to be written to."""
    weights_d = np.arange(1, layout.size + 1, dtype=np.float32)
    integers_m = np.arange(1, layout.num_integers + 1)
    weights_d.flags.writeable = integers_m.flags.writeable = False
    return weights_d, integers_m


def assert_round_trip(module: nn.Module):
    layout = layout_of(module)
    weights_d, integers_m = filled(layout)
    weights.load(module, layout, weights_d, integers_m)
    back_d, back_m = weights.read(module, layout)
    np.testing.assert_array_equal(weights_d, back_d)
    np.testing.assert_array_equal(integers_m, back_m)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_of_every_type_make_the_round_trip(dtype: torch.dtype):
    """Small whole numbers survive in each floating-point type."""
    assert_round_trip(Bag(p=nn.Parameter(torch.zeros(3, 2, dtype=dtype))))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_every_type_make_the_round_trip(dtype: torch.dtype):
    """So do integers and booleans."""
    assert_round_trip(Bag(count=torch.zeros(1, dtype=dtype)))


@given(hnp.arrays(np.float32, 7), hnp.arrays(np.int64, 2))
@few(50)
def test_values_make_the_round_trip_bit_by_bit(
    weights_d: np.ndarray, integers_m: np.ndarray
):
    """Any float32, NaN and infinity included, and any int64."""
    module = Bag(p=nn.Parameter(torch.zeros(5)), n=torch.zeros(2, dtype=torch.int64))
    layout = layout_of(module)
    weights.load(module, layout, weights_d, integers_m)
    back_d, back_m = weights.read(module, layout)
    assert weights_d.tobytes() == back_d.tobytes()
    assert integers_m.tobytes() == back_m.tobytes()


@given(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3), st.randoms())
@few(50)
def test_every_shape_makes_the_round_trip(shape: tuple[int, ...], random: Random):
    """Scalars, empty tensors and tensors whose axes are permuted in memory."""
    axes = random.sample(range(len(shape)), len(shape))
    tensor = torch.zeros([shape[a] for a in axes]).permute(np.argsort(axes).tolist())
    assert_round_trip(Bag(p=nn.Parameter(tensor)))


def test_tied_weights_stand_once_and_stay_tied():
    """A shared embedding has one name, and a load reaches both users."""
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    module[1].weight = module[0].weight
    layout = layout_of(module)
    assert [t.name for t in layout.tensors] == ["0.weight"]
    weights.load(module, layout, *filled(layout))
    assert module[1].weight is module[0].weight
    assert module[1].weight[0].tolist() == [1, 2, 3]


def test_batch_norm_has_parameters_buffers_and_a_counter():
    """Running statistics are averaged, the counter is not."""
    roles = roles_of(layout_of(nn.BatchNorm1d(2)))
    assert roles == {
        "weight": Role.PARAMETER,
        "bias": Role.PARAMETER,
        "running_mean": Role.BUFFER,
        "running_var": Role.BUFFER,
        "num_batches_tracked": Role.MAX,
    }
    assert_round_trip(nn.BatchNorm1d(2))


def test_roles_follow_the_first_pattern_that_fits():
    """Others are the server's."""
    module = Bag(**{n: torch.zeros(1, dtype=torch.int64) for n in ("a1", "a2", "b")})
    roles = roles_of(layout_of(module, a1="keep", **{"a*": "max"}))
    assert [roles[n] for n in ("a1", "a2", "b")] == [
        Role.KEEP,
        Role.MAX,
        Role.FROM_SERVER,
    ]


def test_frozen_parameters_travel():
    """They are state like any other."""
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    module[0].requires_grad_(requires_grad=False)
    assert len(layout_of(module).tensors) == 4
    assert_round_trip(module)


class _ExtraState(nn.Linear):
    def get_extra_state(self) -> object:
        return {"anything": 1}

    def set_extra_state(self, state: object) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bag(c=torch.zeros(1, dtype=torch.complex64)), "complex64"),
        (lambda: Bag(c=torch.zeros(2, 1).expand(2, 3)), r"expand\(\)"),
        (lambda: Bag(c=torch.zeros(2, device="meta")), "meta device"),
        (lambda: Bag(c=torch.zeros(2).to_sparse()), "sparse"),
        (lambda: _ExtraState(1, 1), "only tensors"),
        (lambda: nn.LazyLinear(3), "lazy"),
        (nn.Flatten, "nothing to train"),
        (lambda: nn.Linear(1, 1).requires_grad_(requires_grad=False), "nothing to tr"),
    ],
)
def test_what_cannot_travel_is_refused(make: Callable[[], nn.Module], message: str):
    """Each kind of tensor that cannot be sent has its own words."""
    with pytest.raises(JobError, match=message) as caught:
        layout_of(make())
    assert caught.value.key == "model.factory"


@pytest.mark.parametrize(("extra_d", "extra_m"), [(1, 0), (0, 1), (-1, 0)])
def test_vectors_of_another_length_are_refused(extra_d: int, extra_m: int):
    """Neither a longer nor a shorter vector is loaded, not even in part."""
    module = nn.BatchNorm1d(2)
    layout = layout_of(module)
    before_d, _ = weights.read(module, layout)
    with pytest.raises(LayoutMismatch, match=r"got .* for a model of"):
        weights.load(
            module,
            layout,
            np.ones(layout.size + extra_d, np.float32),
            np.ones(layout.num_integers + extra_m, np.int64),
        )
    np.testing.assert_array_equal(before_d, weights.read(module, layout)[0])
