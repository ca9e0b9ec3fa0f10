"""A model as one flat vector, and the layout that says what is where."""

import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from federation import vectors
from federation.errors import LayoutMismatch
from federation.vectors import Layout, Role

TENSORS = [
    ("conv.weight", (2, 3), "float32", Role.PARAMETER),
    ("steps", (), "int64", Role.MAX),
    ("norm.mean", (4,), "bfloat16", Role.BUFFER),
    ("table", (2, 2), "int32", Role.FROM_SERVER),
    ("mask", (3,), "bool", Role.KEEP),
]
LAYOUT = Layout.build(TENSORS)


def test_float_views_share_the_vectors_memory():
    """Writing to a tensor's view writes to the model."""
    vector_d = np.zeros(LAYOUT.size, dtype=np.float32)
    for number, (_, view) in enumerate(LAYOUT.float_views(vector_d), start=1):
        view[...] = number
    assert vector_d.tolist() == [1] * 6 + [2] * 4


@pytest.mark.parametrize(
    ("role", "expected"),
    [(Role.MAX, [0]), (Role.FROM_SERVER, [1, 2, 3, 4]), (Role.KEEP, [5, 6, 7])],
)
def test_integer_mask_marks_one_role(role: Role, expected: list[int]):
    """A mask holds the positions of its role and no other."""
    assert np.flatnonzero(LAYOUT.integer_mask(role)).tolist() == expected


def test_digest_is_of_names_shapes_types_and_roles():
    """Any language can compute it: SHA-256 of a JSON list of rows."""
    rows = [
        [name, list(shape), dtype, str(role)] for name, shape, dtype, role in TENSORS
    ]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest() == LAYOUT.digest


@pytest.mark.parametrize(
    ("position", "tensor"),
    [
        (0, ("conv.weight", (3, 2), "float32", Role.PARAMETER)),
        (2, ("norm.mean", (4,), "float32", Role.BUFFER)),
        (4, ("mask", (3,), "bool", Role.MAX)),
        (4, ("other", (3,), "bool", Role.KEEP)),
    ],
)
def test_other_tensor_is_named(
    position: int, tensor: tuple[str, tuple[int, ...], str, Role]
):
    """The message names the first tensor that differs and who holds it."""
    other = Layout.build([*TENSORS[:position], tensor, *TENSORS[position + 1 :]])
    match = rf"site a has a different model: tensor '{TENSORS[position][0]}'"
    with pytest.raises(LayoutMismatch, match=match):
        LAYOUT.check_same(other, whose="site a")


def test_other_order_is_a_mismatch():
    """The same tensors elsewhere in the vector are another model."""
    with pytest.raises(LayoutMismatch, match="in a different order"):
        LAYOUT.check_same(Layout.build(TENSORS[::-1]), whose="site a")


def test_repeated_name_is_refused():
    """Two tensors of one name cannot be told apart."""
    with pytest.raises(LayoutMismatch, match=r"two tensors.*conv\.weight"):
        Layout.build([TENSORS[0], TENSORS[0]])


@pytest.mark.parametrize("tensors", [[], TENSORS[1:2]])
def test_model_without_floats_is_refused(
    tensors: list[tuple[str, tuple[int, ...], str, Role]],
):
    """There is nothing to train in it."""
    with pytest.raises(LayoutMismatch, match="no floating-point tensor"):
        Layout.build(tensors)


@pytest.mark.parametrize(
    ("size", "expected"), [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])]
)
def test_chunks_cover_the_range_once(size: int, expected: list[int]):
    """Slices follow one another, and only the last is shorter."""
    pieces = list(vectors.chunks(size, 4))
    assert [p.stop - p.start for p in pieces] == expected
    assert [i for p in pieces for i in range(p.start, p.stop)] == list(range(size))


def test_norm_is_accumulated_in_double_precision():
    """Many small squares beside a large one are not lost."""
    vector_d = np.full(3 * vectors.CHUNK_VALUES + 5, 1e-3, dtype=np.float32)
    vector_d[0] = 1e4
    expected = math.sqrt(math.fsum(float(x) ** 2 for x in vector_d))
    assert vectors.norm(vector_d) == pytest.approx(expected, rel=1e-12)


def test_norm_beyond_single_precision_is_finite():
    """Squares of float32 values do not overflow."""
    vector_d = np.full(4, 3e38, dtype=np.float32)
    assert vectors.norm(vector_d) == pytest.approx(6e38, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, vectors.CHUNK_VALUES + 1, -1])
def test_one_bad_value_is_found(value: float, position: int):
    """Wherever it is, a value that is not finite is noticed."""
    vector_d = np.ones(2 * vectors.CHUNK_VALUES + 3, dtype=np.float32)
    vector_d[position] = value
    assert not vectors.is_finite(vector_d)
    assert not math.isfinite(vectors.norm(vector_d))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 5001, (1 << 20) - 1, (1 << 20) + 7, -1])
def test_one_bad_value_is_found_among_millions(value: float, position: int):
    """Sums of columns, over which most of a large vector is checked, hide nothing."""
    vector_d = np.ones((2 << 20) + 3, dtype=np.float32)
    assert vectors.is_finite(vector_d)
    vector_d[position] = value
    assert not vectors.is_finite(vector_d)
    vector_d[position] = 3e38
    vector_d[position - 4096] = 3e38
    assert vectors.is_finite(vector_d)


def test_opposite_infinities_do_not_hide_each_other():
    """They are not finite even if a sum could cancel them."""
    assert not vectors.is_finite(np.array([np.inf, -np.inf], dtype=np.float32))
    vector_d = np.zeros(1 << 20, dtype=np.float32)
    vector_d[7], vector_d[7 + 4096] = np.inf, -np.inf
    assert not vectors.is_finite(vector_d)


def test_frozen_tensors_lie_in_neither_vector():
    """Places are those that they would be without them; the digest knows of them."""
    rows = [
        ("base", (5,), "float32", Role.FROZEN),
        ("codes", (7,), "uint8", Role.FROZEN),
        ("head", (2, 3), "float32", Role.PARAMETER),
        ("count", (), "int64", Role.MAX),
    ]
    layout = replace(Layout.build(rows), frozen="ab" * 32)
    assert (layout.size, layout.num_integers, layout.num_frozen) == (6, 1, 12)
    assert [s.name for s, _ in layout.float_views(np.zeros(6, np.float32))] == ["head"]
    assert [s.name for s, _ in layout.integer_views(np.zeros(1, np.int64))] == ["count"]
    assert layout.digest != replace(layout, frozen="cd" * 32).digest
    assert layout.digest != Layout.build(rows[2:]).digest


def test_a_layout_without_frozen_tensors_keeps_its_digest():
    """Golden vectors name it."""
    layout = Layout.build([("w", (2,), "float32", Role.PARAMETER)])
    rows = b'[["w", [2], "float32", "parameter"]]'
    assert layout.digest == hashlib.sha256(rows).hexdigest()
