"""The mean of adapters as a mean of products, against dense matrices in float64."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job

from aggregator.combine import weighted_mean
from aggregator.exact_adapters import ExactAdapters
from clients.models.model_pool import ModelPool
from federation.compression.apart import Without, fitted
from federation.compression.codec import IDENTITY, Links, decoded, encoded_over
from federation.errors import JobError
from federation.ids import SiteId
from federation.job.adapters import Factors, check_exact, check_factors
from federation.job.spec import JobSpec
from federation.protocols import WeightedUpdate
from federation.vectors import Layout, Role, Vector

OUTPUTS, INPUTS, RANK, SCALE = 5, 4, 2, 2.0
WEIGHTS = (1.0, 3.0, 2.0)


def layout(role: Role = Role.SERVER, *, transposed: bool = False) -> Layout:
    shape = (INPUTS, OUTPUTS) if transposed else (OUTPUTS, INPUTS)
    return Layout.build(
        [
            ("bias", (3,), "float32", Role.PARAMETER),
            ("w", shape, "float32", role),
            ("a", (RANK, INPUTS), "float32", Role.PARAMETER),
            ("b", (OUTPUTS, RANK), "float32", Role.PARAMETER),
        ]
    )


def factors(**changes: bool) -> Factors:
    return Factors(weight="w", a="a", b="b", scale=SCALE, **changes)


def weight_of(model_d: Vector, place: Layout, *, transposed: bool = False) -> Vector:
    """What a layer multiplies its inputs by, in float64."""
    part = {s.name: v.astype(np.float64) for s, v in place.float_views(model_d)}
    product = SCALE * part["b"] @ part["a"]
    return part["w"] + (product.T if transposed else product)


def start_and_updates(size: int) -> tuple[Vector, list[Vector]]:
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=size).astype(np.float32),
        [rng.normal(size=size).astype(np.float32) for _ in WEIGHTS],
    )


def of_sites(deltas: list[Vector]) -> Iterator[WeightedUpdate]:
    for number, (delta_d, weight) in enumerate(zip(deltas, WEIGHTS, strict=True)):
        yield WeightedUpdate(
            site=SiteId(f"site-{number}"),
            delta_d=delta_d.copy(),
            weight=weight,
            handed_over=True,
            refuse=lambda: None,
        )


def without_weight(deltas: list[Vector], place: Layout) -> list[Vector]:
    """Updates as sites send them: none changes the weight."""
    for delta_d in deltas:
        for spec, view in place.float_views(delta_d):
            if spec.name == "w":
                view[...] = 0
    return deltas


@pytest.mark.parametrize("transposed", [False, True])
def test_fedex_equals_the_mean_of_the_sites_models(transposed: bool):  # noqa: FBT001
    """To 1e-6, where averaging the factors is far off."""
    place = layout(transposed=transposed)
    start_d, deltas = start_and_updates(place.size)
    deltas = without_weight(deltas, place)
    models = [weight_of(start_d + d, place, transposed=transposed) for d in deltas]
    exact = np.average(models, axis=0, weights=WEIGHTS)
    rule = ExactAdapters(place, (factors(transposed=transposed),))(start_d)
    mean_d = rule(of_sites(deltas), np.zeros(place.size, np.float32))
    found = weight_of(start_d + mean_d, place, transposed=transposed)
    np.testing.assert_allclose(found, exact, atol=3e-6)
    plain_d = weighted_mean(of_sites(deltas), np.zeros(place.size, np.float32))
    plain = weight_of(start_d + plain_d, place, transposed=transposed)
    assert np.abs(plain - exact).max() > 1
    np.testing.assert_allclose(mean_d[:3], plain_d[:3])  # All else is as ever.


def test_svd_is_the_best_product_of_its_rank():
    place = layout(Role.FROZEN)
    start_d, deltas = start_and_updates(place.size)
    rule = ExactAdapters(place, (factors(refactored=True),))(start_d)
    mean_d = rule(of_sites(deltas), np.zeros(place.size, np.float32))

    def product(model_d: Vector) -> Any:
        part = {s.name: v.astype(np.float64) for s, v in place.float_views(model_d)}
        return part["b"] @ part["a"]

    exact = np.average([product(start_d + d) for d in deltas], axis=0, weights=WEIGHTS)
    u, s, vt = np.linalg.svd(exact)
    best = u[:, :RANK] * s[:RANK] @ vt[:RANK]
    np.testing.assert_allclose(product(start_d + mean_d), best, atol=1e-5)


def test_adapters_that_have_not_moved_can_train_later():
    """New factors of a product that is 0 would both be 0, without a gradient."""
    place = layout(Role.FROZEN)
    start_d, deltas = start_and_updates(place.size)
    for vector_d in (start_d, *deltas):
        {s.name: v for s, v in place.float_views(vector_d)}["b"][...] = 0
    rule = ExactAdapters(place, (factors(refactored=True),))(start_d)
    mean_d = rule(of_sites(deltas), np.zeros(place.size, np.float32))
    plain_d = weighted_mean(of_sites(deltas), np.zeros(place.size, np.float32))
    np.testing.assert_array_equal(mean_d, plain_d)


def test_factors_that_stay_at_their_sites_are_refused():
    """Of no product could a mean be computed, nor of what is read in their place."""
    model = {"factory": "support.task_models:low_rank"}
    assert ModelPool(small_job(model=model)).exact
    with pytest.raises(JobError, match="needs 'b' of each site") as caught:
        ModelPool(small_job(model={**model, "personal": ["b"]}))
    assert caught.value.key == "model.personal"


def test_a_weight_that_is_also_that_of_another_layer_is_refused():
    """A layout has it under the other layer's name; that layer would change, too."""
    rows = [(s.name, s.shape, s.dtype, s.role) for s in layout().tensors]
    check_factors([factors()], Layout.build(rows))
    tied = Layout.build([("wte", *row[1:]) if row[0] == "w" else row for row in rows])
    check_factors([factors(refactored=True)], tied)
    with pytest.raises(JobError, match=r"'w', which is also .* \(tied\)") as caught:
        check_factors([factors()], tied)
    assert caught.value.key == "model.options.lora.targets"


def test_a_refused_update_leaves_no_product():
    place = layout()
    start_d, deltas = start_and_updates(place.size)
    deltas = without_weight(deltas, place)
    rule = ExactAdapters(place, (factors(),))
    wanted_d = rule(start_d)(of_sites(deltas), np.zeros(place.size, np.float32))
    refused: list[bool] = []

    def with_a_bad_one() -> Iterator[WeightedUpdate]:
        yield from of_sites(deltas)
        bad_d = np.full(place.size, np.nan, np.float32)
        yield WeightedUpdate(
            site=SiteId("bad"),
            delta_d=bad_d,
            weight=1.0,
            refuse=lambda: refused.append(True),
        )

    found_d = rule(start_d)(with_a_bad_one(), np.zeros(place.size, np.float32))
    assert refused == [True]
    np.testing.assert_array_equal(found_d, wanted_d)
    nobody = WeightedUpdate(
        site=SiteId("bad"), delta_d=np.full(place.size, np.nan, np.float32), weight=1.0
    )
    with pytest.raises(ValueError, match="not finite"):
        rule(start_d)([nobody], np.zeros(place.size, np.float32))


def test_what_the_server_sets_is_not_sent_up():
    place = layout()
    links = fitted(Links(), place)
    assert isinstance(links.up, Without)
    assert links.down is IDENTITY
    _, (delta_d, *_) = start_and_updates(place.size)
    (delta_d,) = without_weight([delta_d], place)
    words = encoded_over(links.up, delta_d.copy())
    assert words.size == place.size - OUTPUTS * INPUTS
    assert links.up.fault(words, place.size) == ""
    assert "identity are not" in links.up.fault(words[:-1], place.size)
    np.testing.assert_array_equal(decoded(links.up, words, place.size), delta_d)
    np.testing.assert_array_equal(links.up.encode(delta_d), words)
    with pytest.raises(ValueError, match="residual"):
        links.up.encode(delta_d, residual_d=delta_d)
    with pytest.raises(ValueError, match="number of values"):
        links.up.values(words)


KEPT = {"name": "adam", "state": "keep"}


def refusing(**tables: Any) -> JobSpec:
    return small_job(num_sites=3, **tables)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (
            {"privacy": {"secure_aggregation": {"enabled": True, "max_examples": 9}}},
            "secure aggregation hides",
        ),
        ({"aggregation": {"combine": "median", "weights": "uniform"}}, "not mean"),
        ({"aggregation": {"server_optimizer": {"name": "adam"}}}, "server optimiser"),
        ({"communication": {"codec": {"name": "bf16"}}}, "codecs round"),
        (
            {"training": {"local_steps": 2, "optimizer": KEPT}},
            "other factors",
        ),
        ({"training": {"local_steps": 2, "overlap_steps": 1}}, "overlap_steps"),
        ({"schedule": {"mode": "buffered"}}, "older model"),
        ({"selection": {"model": "ema"}}, "several rounds"),
        ({"selection": {"model": "swa"}}, "several rounds"),
    ],
)
def test_jobs_that_cannot_average_products_are_refused(
    tables: dict[str, Any], text: str
):
    check_exact(refusing())
    with pytest.raises(JobError, match=text) as caught:
        check_exact(refusing(**tables))
    assert caught.value.key == "model.options.lora.method"
