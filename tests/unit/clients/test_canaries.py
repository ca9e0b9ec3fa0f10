"""Canaries: what they add to a model, to data and to a clipped sum."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.small_jobs import blobs
from torch import nn

from clients.audit.canaries import (
    CanariedData,
    CanaryScores,
    draw_canaries,
    record_shape,
    with_canaries,
)
from clients.data.datasets import Dataset, Examples, as_dataset
from clients.models import gpt
from clients.models.objectives import OBJECTIVES
from clients.models.weights import layout_of
from federation.errors import JobError, SiteError
from privacy.dp_sgd.clipping import ClippedSum
from privacy.dp_sgd.fit import fit_for_privacy
from privacy.dp_sgd.person_batch import PersonBatch

MakeData = Callable[[], Dataset]
MakeModel = Callable[[], nn.Module]

IS_IN = np.array([True, False, True, True])
CLIP = 0.5
GPT = {"vocabulary": 7, "context": 5, "layers": 1, "heads": 1, "width": 8}


def points() -> Dataset:
    """Sixty examples of three classes."""
    return as_dataset(blobs()[0], name="train")


def windows() -> Dataset:
    """Six windows of six tokens."""
    tokens = np.arange(36).reshape(6, 6) % 7
    return as_dataset(Examples(inputs=tokens), name="train")


def linear_model() -> nn.Module:
    options = {"inputs": 4, "classes": 3}
    return with_canaries(
        "clients.models:logistic_regression",
        options,
        num_canaries=len(IS_IN),
        gradient_norm=2 * CLIP,
        shape=(4,),
        task="classification",
    )


def language_model() -> nn.Module:
    torch.manual_seed(3)
    return with_canaries(
        "clients.models:gpt",
        GPT,
        num_canaries=len(IS_IN),
        gradient_norm=2 * CLIP,
        shape=(6,),
        task="causal_lm",
    )


both = pytest.mark.parametrize(
    ("task", "data", "make"),
    [("classification", points, linear_model), ("causal_lm", windows, language_model)],
)


def clipped_sum(
    model: nn.Module,
    data: CanariedData,
    chosen: NDArray[np.int64],
    task: str,
    how: str,
    *,
    persons: PersonBatch | None = None,
) -> dict[str, torch.Tensor]:
    """Clipped sum over records as a private step takes it, by parameter."""
    total = ClippedSum(model, clip_norm=CLIP, clipping=how, batch_size=64)
    inputs, targets = data.batch(chosen)

    def loss() -> torch.Tensor:
        found = OBJECTIVES[task](model, inputs, targets)
        return found.total / (found.count / len(chosen))

    total.add_(loss, len(chosen), persons)
    sizes = [p.numel() for p in total.parameters.values()]
    return dict(zip(total.parameters, torch.split(total.sum_d, sizes), strict=True))


@both
@pytest.mark.parametrize("how", ["hooks", "ghost"])
def test_canary_that_is_in_adds_the_clip_norm_to_its_coordinate(
    task: str, data: MakeData, make: MakeModel, how: str
):
    """And nothing anywhere else, whatever the values have become; one out adds none."""
    model, _ = fit_for_privacy(make())
    with torch.no_grad():
        model.get_parameter("canaries.weight")[1:] = torch.tensor(
            [[9.0], [-4], [7], [0]]
        )
    base = data()
    canaried = CanariedData(base, IS_IN, task=task)
    extra = np.arange(len(base), len(canaried))
    found = clipped_sum(model, canaried, extra, task, how)
    each = -CLIP / math.sqrt(2)
    moved = found.pop("canaries.weight")
    assert moved.tolist() == pytest.approx([0, each, 0, each, each], rel=1e-3)
    moved = found.pop("linear.weight")
    assert moved.tolist() == pytest.approx([each, 0, each, each], rel=1e-3)
    assert not any(part.any() for part in found.values())


@both
@pytest.mark.parametrize("how", ["hooks", "ghost"])
def test_canary_that_is_a_person_adds_the_clip_norm_once(
    task: str, data: MakeData, make: MakeModel, how: str
):
    """However many of its records are drawn; one of another person adds nothing."""
    model, _ = fit_for_privacy(make())
    base = data()
    canaried = CanariedData(base, IS_IN, task=task, records_each=3, num_empty=2)
    drawn = len(base) + np.array([0, 1, 2, 4, 6, 7, 9, 12])
    sizes = PersonBatch(sizes=np.array([3, 1, 2, 1, 1]), most=3)
    found = clipped_sum(model, canaried, drawn, task, how, persons=sizes)
    each = -CLIP / math.sqrt(2)
    moved = found.pop("canaries.weight")
    assert moved.tolist() == pytest.approx([0, each, 0, each, each], rel=1e-3)
    moved = found.pop("linear.weight")
    assert moved.tolist() == pytest.approx([each, 0, each, each], rel=1e-3)
    assert not any(part.any() for part in found.values())


def test_canaries_are_persons_of_their_own():
    """And so is each record that fills up; the site's own persons stay."""
    ids = np.array(["b", "a", "b"])
    named = Examples(inputs=np.zeros((3, 4)), targets=np.zeros(3, int), persons=ids)
    data = as_dataset(named, name="train")
    canaried = CanariedData(
        data, IS_IN[:2], task="classification", records_each=2, num_empty=2
    )
    assert canaried.persons is not None
    assert canaried.persons.tolist() == [1, 0, 1, 2, 2, 3, 3, 4, 5]
    codes = canaried.batch(np.arange(9))[0][:, -1]
    assert codes.tolist() == [0, 0, 0, 2, 2, 1, 1, 1, 1]
    plain = CanariedData(points(), IS_IN, task="classification")
    assert plain.persons is None


@both
def test_ordinary_records_train_as_without_canaries(
    task: str, data: MakeData, make: MakeModel
):
    """Same logits, same clipped sum, and no trace on any canary's coordinate."""
    model, _ = fit_for_privacy(make())
    base = data()
    canaried = CanariedData(base, IS_IN, task=task)
    chosen = np.arange(len(base))
    inputs, targets = base.batch(chosen)
    plain = OBJECTIVES[task](model.get_submodule("model"), inputs, targets)
    coded = OBJECTIVES[task](model, *canaried.batch(chosen))
    assert torch.equal(plain.total, coded.total)
    found = clipped_sum(model, canaried, chosen, task, "hooks")
    assert not found.pop("canaries.weight").any()
    assert not found.pop("linear.weight").any()
    assert any(part.any() for part in found.values())


def test_canaried_data_keeps_records_and_its_length():
    """Canaries that are out take their places too: the length tells nothing."""
    base = points()
    for truth in (IS_IN, ~IS_IN, np.zeros(4, bool)):
        assert len(CanariedData(base, truth, task="classification")) == len(base) + 4
    canaried = CanariedData(base, IS_IN, task="classification")
    inputs, targets = canaried.batch(np.array([5, 61, 60]))
    assert inputs[:, -1].tolist() == [0, 1, 2]
    assert torch.equal(inputs[0, :-1], base.batch(np.array([5]))[0][0])
    assert targets is not None
    assert targets.tolist()[1:] == [0, 0]


def test_draws_are_counted_by_record_or_by_person():
    """A person that a batch reads two records of is drawn once."""
    ids = np.array([7, 3, 7])
    named = Examples(inputs=np.zeros((3, 4)), targets=np.zeros(3, int), persons=ids)
    data = as_dataset(named, name="train")
    for of_persons, expected in ((False, [1, 2, 2, 0, 0, 1]), (True, [2, 2, 0, 1])):
        canaried = CanariedData(
            data,
            IS_IN[:2],
            task="classification",
            records_each=1 + of_persons,
            of_persons=of_persons,
            num_empty=0 if of_persons else 1,
        )
        for chosen in ([0, 1, 2], [1, 2, len(canaried) - 1]):
            canaried.batch(np.array(chosen))
        assert canaried.draws_u.tolist() == expected


def test_windows_keep_their_length():
    """A code is in the first token, which is no target."""
    inputs, _ = CanariedData(windows(), IS_IN, task="causal_lm").batch(np.array([0, 9]))
    assert inputs.tolist() == [[0, 1, 2, 3, 4, 5], [-5, 0, 0, 0, 0, 0]]


def test_scores_add_up_updates_along_the_coordinates():
    """Over two rounds, whatever else of the model moves."""
    layout = layout_of(linear_model(), {})
    scores = CanaryScores(layout, 4)
    before = np.arange(layout.size, dtype=np.float32)
    place = next(t.offset for t in layout.tensors if t.name == "canaries.weight")
    for _ in range(2):
        after = before + 1
        after[place + 1 : place + 5] += np.array([2, -1, -2, 1])
        scores.see(before, after)
    # Of each pair of coordinates, over their norm; one half moved by 1 a round.
    expected = np.array([8, 2, 0, 6]) / math.sqrt(2)
    assert scores.scores_m.tolist() == pytest.approx(expected)
    assert scores.products_m.tolist() == pytest.approx((expected / 2) ** 2)


def test_updates_of_larger_steps_count_for_more():
    """By their weight, as far as the canaries have moved."""
    layout = layout_of(linear_model(), {})
    scores = CanaryScores(layout, 1)
    before = np.zeros(layout.size, dtype=np.float32)
    for weight in (1.0, 16.0):
        scores.see(before, before + 1, weight=weight)
    assert scores.scores_m.tolist() == pytest.approx([17 * math.sqrt(2)])


def test_canaries_of_one_sum_have_places_apart():
    """A site's begin where another's end, in data and in scores."""
    data = CanariedData(points(), IS_IN[:2], task="classification", first=2)
    codes = data.batch(np.arange(len(data)))[0][-2:, -1]
    assert codes.tolist() == [2 + 2, 1]
    layout = layout_of(linear_model(), {})
    place = next(t.offset for t in layout.tensors if t.name == "canaries.weight")
    scores = CanaryScores(layout, 2, first=2)
    for _ in range(2):
        mean_d = np.zeros(layout.size, np.float32)
        mean_d[place : place + 5] = [9, 8, 7, -1, 2]
        scores.see_sum(mean_d)
    assert scores.scores_m.tolist() == pytest.approx(np.array([-2, 4]) / math.sqrt(2))


def test_who_is_in_comes_from_the_bytes():
    """One bit for each canary."""
    drawn = draw_canaries(11, bytes([0b10100000, 0b01100000]))
    assert drawn.nonzero()[0].tolist() == [0, 2, 9, 10]


def test_start_of_the_model_is_the_jobs_own():
    """The job's factory draws first, so a seed gives it the same weights."""
    torch.manual_seed(3)
    plain = gpt(**GPT).state_dict()
    wrapped = language_model().state_dict()
    assert all(torch.equal(wrapped[f"model.{n}"], t) for n, t in plain.items())


def test_factory_that_makes_no_model_is_refused():
    """As without canaries."""
    with pytest.raises(JobError, match="Examples"):
        with_canaries(
            "clients.data.datasets:Examples",
            {"inputs": np.zeros(2)},
            num_canaries=1,
            gradient_norm=1.0,
            shape=(4,),
            task="classification",
        )


def test_data_that_cannot_carry_canaries_is_refused():
    """Language models on images, classifiers without classes, tokens below 0."""
    unlabelled = as_dataset(Examples(inputs=np.zeros((3, 4))), name="train")
    negative = as_dataset(Examples(inputs=np.full((3, 4), -1)), name="train")
    with pytest.raises(SiteError, match="windows of integer tokens"):
        CanariedData(unlabelled, IS_IN, task="causal_lm")
    with pytest.raises(SiteError, match="needs targets"):
        CanariedData(unlabelled, IS_IN, task="classification")
    with pytest.raises(SiteError, match="below 0"):
        CanariedData(negative, IS_IN, task="causal_lm").batch(np.array([0]))


def test_canaried_data_is_whole():
    """It is dealt out already."""
    data = CanariedData(points(), IS_IN, task="classification")
    assert (data.labels(), data.groups, data.group_names) == (None, None, ())
    with pytest.raises(NotImplementedError):
        data.subset(np.array([0]))
    assert record_shape(points()) == (4,)
