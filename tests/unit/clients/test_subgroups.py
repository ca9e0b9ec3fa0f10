"""Results by subgroup, and what a small one would reveal."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from support.small_jobs import blobs, small_job
from support.without_report import simulate

from clients.data.datasets import Examples
from clients.preprocessing import preprocessing
from clients.training.subgroups import pooled, suppressed
from federation.errors import JobError, QuorumNotMet
from federation.job.metrics import evaluated_of, noised_of
from federation.job.spec import JobSpec
from federation.messages import MetricSums
from monitoring.views.derived_metrics import derived, reliability
from privacy.dp.held_out import HeldOutMechanism

SECURE = {"enabled": True, "clip_norm": 5.0, "max_examples": 1000}
PRIVATE = {"unit": "record", "target_epsilon": 8.0, "clip_norm": 1.0, "delta": 1e-4}


@preprocessing("none")
def wards(first: int = 60) -> tuple[Examples, Examples]:
    """Records of two wards, and a few of a third one, which no job names."""

    def part(size: int) -> Examples:
        found, _ = blobs(size)
        groups = np.where(np.arange(size) < first, 0, 1)
        groups[-20:] = 2
        names = ("north", "south", "east")
        return Examples(
            inputs=found.inputs,
            targets=found.targets,
            groups=groups,
            group_names=names,
        )

    return part(120), part(120)


@preprocessing("none")
def columns() -> tuple[dict[str, Any], dict[str, Any]]:
    """The same records, with the ward as a column."""
    train, held_out = (
        {"x": part.inputs, "ward": part.groups * 10, "labels": part.targets}
        for part in wards()
    )
    return train, held_out


def of_columns() -> Any:
    import torch  # noqa: PLC0415

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, ward: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + 0 * ward[:, None]

    return Net()


def job(num_sites: int = 2, source: str = "wards", **changes: Any) -> JobSpec:
    training = {
        "local_steps": 2,
        "batch_size": 8,
        "optimizer": {"lr": 0.5},
        "subgroups": ["north", "south"],
        "measures": ["reliability"],
        **changes.pop("training", {}),
    }
    options = changes.pop("options", {})
    data = {"source": f"unit.clients.test_subgroups:{source}", "options": options}
    tables = {"aggregation": {"weights": "uniform"}, "data": data}
    return small_job(num_sites=num_sites, training=training, **tables | changes)


@pytest.mark.parametrize("privacy", [{}, {"secure_aggregation": SECURE}], ids=str)
def test_subgroups_and_bins_add_up_to_the_whole(privacy: dict[str, Any]):
    """Counted again with the weights; the third ward is in the total alone."""
    tables = {"privacy": privacy} if privacy else {}
    done = simulate(job(3, training={"min_subgroup": 1}, **tables))
    _, held_out = wards()
    weight, bias = (
        a for _, a in sorted(done.weights.items(), key=lambda n: -n[1].ndim)
    )
    logits = held_out.inputs.astype(np.float64) @ weight.T + bias
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    hits = logits.argmax(1) == held_out.targets
    losses = -np.log(shares[np.arange(len(hits)), held_out.targets])
    final = done.summary()["final"]
    for number, row in enumerate(final["subgroups"]):
        mine = held_out.groups == number
        assert row["count"] == mine.sum()
        assert row["accuracy"] == hits[mine].mean()
        assert row["loss"] == pytest.approx(losses[mine].mean(), abs=1e-5)
    assert done.view.last_evaluated is not None
    assert done.view.last_evaluated.pooled.count == len(hits)
    bins = final["reliability"]
    assert sum(each["count"] for each in bins) == len(hits)
    for number, each in enumerate(bins):
        mine = np.ceil(shares.max(1) * len(bins)) - 1 == number
        assert each["count"] == mine.sum()
        if mine.any():
            assert each["accuracy"] == pytest.approx(hits[mine].mean())
            assert each["confidence"] == pytest.approx(shares.max(1)[mine].mean())


def test_a_column_says_the_same_as_groups():
    changes: dict[str, Any] = {
        "source": "columns",
        "model": {"factory": "unit.clients.test_subgroups:of_columns"},
        "training": {"subgroups": ["0", "10.0"], "subgroup_column": "ward"},
    }
    found = simulate(job(1, **changes)).summary()["final"]["subgroups"]
    groups = simulate(job(1)).summary()["final"]["subgroups"]
    assert [row["count"] for row in found] == [row["count"] for row in groups]
    assert [row["name"] for row in found] == ["0", "10.0"]


def test_no_small_subgroup_can_be_computed():
    """The attack: the total less what is shown, for many sizes of subgroups."""
    for sizes in product((0, 1, 4, 9, 10, 30), repeat=3):
        hidden = suppressed(sizes, 10)
        rest = sum(sizes[number] for number in hidden)
        assert all(sizes[n] >= 10 or n in hidden or not sizes[n] for n in range(3))
        assert rest == 0 or rest >= 10 or rest == sum(sizes), sizes
    assert suppressed((1, 50, 80), 10) == {0, 1}
    assert suppressed((1, 50, 80), 0) == set()


def test_a_subgroup_of_one_record_leaves_no_site():
    """Nor does the next one, from which it would follow."""
    found = simulate(job(1, options={"first": 1})).summary()["final"]["subgroups"]
    assert [row["count"] for row in found] == [0, 99]
    alone = simulate(job(1, options={"first": 1}, training={"min_subgroup": 1}))
    assert alone.summary()["final"]["subgroups"][0]["count"] == 1
    report = simulate(job(1, options={"first": 99})).summary()["final"]["subgroups"]
    assert [row["count"] for row in report] == [99, 0]


def test_noise_has_the_stated_deviation_in_every_table():
    """Vectorised over repetitions: within 10 % for counts, losses, hits and bins."""
    training = job().training
    mechanism = HeldOutMechanism(
        noise_multiplier=2.0,
        predictions=1,
        num_records=512,
        metrics=noised_of(training),
    )
    exact = MetricSums(
        count=10**6,
        loss_sum=3e6,
        metrics=dict.fromkeys(mechanism.metrics, 4e5),
    )
    drawn = [mechanism.release(exact) for _ in range(300)]
    # Count, loss and hits; those of subgroups; and three tables of bins.
    parts = 3 + 3 + 3
    stated = mechanism.standard_deviation()
    assert stated == pytest.approx(2.0 * np.sqrt(parts), rel=0.02)
    by_kind: dict[str, list[float]] = {}
    for sums in drawn:
        for name, metric in mechanism.metrics.items():
            kind = metric.histogram or name
            error = (sums.metrics[name] - 4e5) / metric.reach
            by_kind.setdefault(kind, []).append(error)
    assert len(by_kind) == 7
    for kind, errors in by_kind.items():
        slack = 0.1 + 3 / np.sqrt(2 * len(errors))
        if len(errors) > 4000:
            slack = 0.1
        assert np.std(errors) == pytest.approx(stated, rel=slack), kind


def test_a_record_changes_one_cell_of_each_table():
    """What the noise is made for: by the bounds, one record more or less."""
    training = job().training
    losses = {n: m for n, m in noised_of(training).items() if n.endswith("_loss")}
    assert {metric.high for metric in losses.values()} == {6.0}
    wide = {evaluated_of(training)[name].high for name in losses}
    assert wide == {32.0}  # Without noise a site's mean may be larger.


def test_private_subgroups_are_noised_and_never_left_out():
    """Whether one is left out would depend on single records."""
    parts = [
        MetricSums(count=n, loss_sum=float(n), metrics={"correct": n}) for n in (1, 99)
    ]
    for privacy, counts in (({}, [0, 0]), ({"differential_privacy": PRIVATE}, [1, 99])):
        spec = job(1, **({"privacy": privacy} if privacy else {}))
        found = pooled(spec, (1, 99), parts)
        assert found.count == 100
        assert [found.metrics[f"subgroup_{n}_count"] for n in (0, 1)] == counts
    done = simulate(job(1, privacy={"differential_privacy": PRIVATE}))
    sums = done.view.last_evaluated.pooled  # type: ignore[union-attr]
    assert not float(sums.metrics["subgroup_0_loss"]).is_integer()
    assert reliability(sums)
    assert "calibration_error" in derived(sums)


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"subgroups": ["a", "a"]}, "training.subgroups"),
        ({"subgroups": ["a"], "subgroup_column": "x"}, "training.subgroups"),
        ({"subgroups": [], "subgroup_column": "x"}, "training.subgroup_column"),
        ({"subgroups": [f"g{n}" for n in range(17)]}, "training.subgroups"),
    ],
)
def test_subgroups_that_make_no_sense_are_refused(training: dict[str, Any], key: str):
    with pytest.raises(JobError) as caught:
        job(training=training)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("source", "training", "words"),
    [
        ("columns", {}, r"site-0.*Examples with groups"),
        (
            "wards",
            {"subgroups": ["0"], "subgroup_column": "age"},
            r"site-0.* no column 'age'",
        ),
    ],
)
def test_a_site_without_the_column_names_it(
    source: str, training: dict[str, Any], words: str
):
    model: dict[str, Any] = {}
    if source == "columns":
        model = {"model": {"factory": "unit.clients.test_subgroups:of_columns"}}
    with pytest.raises(QuorumNotMet, match=words):
        simulate(job(1, source=source, training=training, **model))
