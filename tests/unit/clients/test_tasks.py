"""Built-in objectives, and the metrics that follow from their sums.

Each is compared with torch's loss or scikit-learn's metric on the whole data, while the
sums here are added up over batches and sites.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import small_job
from torch import nn
from torch.nn import functional

from clients.models.objectives import BatchLoss, objective_of, results_by_record
from clients.ranks.peers import NO_PEERS, Sums
from federation.errors import JobError, SiteError
from federation.job.job_digest import digest
from federation.job.metrics import AUC_BINS, evaluated_of
from federation.messages import MetricSums
from federation.tree import Tree, map_tree
from monitoring.views.round_view import accuracy_of, metrics_of

RNG = np.random.default_rng(7)
N = 300


def sk() -> Any:
    """Other people's metrics; importing them takes a second."""
    from sklearn import metrics  # noqa: PLC0415

    return metrics


class Same(nn.Module):
    """Returns what comes in, so that batches are logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *inputs: torch.Tensor) -> Any:
        scaled = tuple(self.scale * part for part in inputs)
        return scaled[0] if len(scaled) == 1 else scaled


def training(task: str, **keys: Any) -> Any:
    job = small_job(training={"local_steps": 1, "task": task, **keys})
    return job.training


def evaluated(spec: Any, inputs: Tree, targets: Tree, *, step: int = 70) -> MetricSums:
    """Sums over batches of two sites, as a round adds them."""
    objective, sites = objective_of(spec), []
    size = len(targets) if targets is not None else len(inputs[0])
    for begin, end in ((0, size // 3), (size // 3, size)):
        sums = Sums(torch.device("cpu"), NO_PEERS, evaluated_of(spec))
        for start in range(begin, end, step):
            part = slice(start, min(start + step, end))
            batch = map_tree(lambda t, part=part: t[part], (inputs, targets))
            with torch.no_grad():
                found = objective(Same(), *batch)
            sums.add(found.loss, found.count, found.metrics)
        sites.append(sums.metrics())
    return sites[0] + sites[1]


def trained(spec: Any, inputs: Tree, targets: Tree) -> BatchLoss:
    found: BatchLoss = objective_of(spec)(Same(), inputs, targets)
    return found


def draw(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.normal(size=shape)).float()


def classes(num: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(0, num, shape))


@pytest.mark.parametrize(
    ("loss", "function"),
    [
        ("mse", functional.mse_loss),
        ("mae", functional.l1_loss),
        ("huber", lambda a, b: functional.huber_loss(a, b, delta=0.3)),
    ],
)
@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 4)])
def test_regression(loss: str, function: Callable[..., Any], shape: tuple[int, ...]):
    found, wanted = draw(*shape), draw(*shape)
    options = {"loss": loss, "delta": 0.3}
    spec = training("regression", options=options)
    batch = trained(spec, found, wanted.flatten() if shape == (N, 1) else wanted)
    assert (batch.total / batch.count).item() == pytest.approx(
        function(found, wanted).item(), rel=1e-6
    )
    sums = evaluated(spec, found, wanted)
    means = metrics_of(sums)
    flat = found.reshape(N, -1).double(), wanted.reshape(N, -1).double()
    assert means["absolute_error"] == pytest.approx(
        sk().mean_absolute_error(*flat), rel=1e-6
    )
    assert means["rmse"] ** 2 == pytest.approx(sk().mean_squared_error(*flat), rel=1e-6)
    assert accuracy_of(sums) is None


def test_binary():
    logits, labels = 2 * draw(N, 1), classes(2, N)
    spec = training("binary", measures=["auc", "calibration"])
    batch = trained(spec, logits, labels)
    expected = functional.binary_cross_entropy_with_logits(logits[:, 0], labels.float())
    assert (batch.total / N).item() == pytest.approx(expected.item(), rel=1e-6)
    sums = evaluated(spec, logits, labels)
    means = metrics_of(sums)
    said = (logits[:, 0] > 0).long()
    assert accuracy_of(sums) == pytest.approx(sk().accuracy_score(labels, said))
    assert means["f1"] == pytest.approx(sk().f1_score(labels, said))
    assert means["precision"] == pytest.approx(sk().precision_score(labels, said))
    assert means["recall"] == pytest.approx(sk().recall_score(labels, said))
    scores = torch.sigmoid(logits[:, 0])
    binned = (scores * AUC_BINS).long()
    assert means["auc"] == pytest.approx(sk().roc_auc_score(labels, binned))
    # What bins lose.
    assert means["auc"] == pytest.approx(sk().roc_auc_score(labels, scores), abs=0.01)
    confidence = torch.maximum(scores, 1 - scores)
    expected_error = calibration_by_hand(confidence, said == labels)
    assert means["calibration_error"] == pytest.approx(expected_error, rel=1e-5)


def calibration_by_hand(confidence: torch.Tensor, right: torch.Tensor) -> float:
    """Guo et al. 2017, equation 3, bin by bin."""
    edges, total = np.linspace(0, 1, 16), 0.0
    values, hits = confidence.numpy().astype(float), right.numpy().astype(float)
    for low, high in itertools.pairwise(edges):
        inside = (values > low) & (values <= high)
        if inside.any():
            gap = abs(hits[inside].mean() - values[inside].mean())
            total += inside.sum() / len(values) * gap
    return total


def test_scores_of_sums_with_noise_are_shares():
    sums = MetricSums(count=9, loss_sum=1.0, metrics={"tp": -0.1, "fp": 0.1, "fn": 4.0})
    assert metrics_of(sums) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_positive_weight():
    logits, labels = draw(N), classes(2, N)
    batch = trained(training("binary", options={"positive_weight": 3}), logits, labels)
    expected = functional.binary_cross_entropy_with_logits(
        logits, labels.float(), pos_weight=torch.tensor(3.0), reduction="sum"
    )
    assert batch.total.item() == pytest.approx(expected.item(), rel=1e-6)


WEIGHTED = {"class_weights": [1, 4.0, 0.5], "label_smoothing": 0.1}


@pytest.mark.parametrize("options", [{n: v} for n, v in WEIGHTED.items()] + [WEIGHTED])
@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_weights_and_smoothing(task: str, options: dict[str, Any]):
    """They change what is minimised as in torch; the plain loss is reported."""
    shape = () if task == "classification" else (2, 2)
    logits, labels = draw(N, 3, *shape), classes(3, N, *shape)
    if shape:
        labels[0] = labels[1, 0] = -100
    batch = trained(training(task, options=options), logits, labels)
    weights = options.get("class_weights")
    each = functional.cross_entropy(
        logits,
        labels,
        weight=torch.tensor(weights) if weights else None,
        label_smoothing=options.get("label_smoothing", 0.0),
        reduction="none",
    )
    assert batch.total.item() == pytest.approx(each.sum().item(), rel=1e-5)
    plain = trained(training(task), logits, labels)
    assert batch.loss.item() == pytest.approx(plain.total.item(), rel=1e-6)
    assert not batch.loss.requires_grad
    sums = [
        evaluated(training(task, **keys), logits, labels)
        for keys in ({"options": options}, {})
    ]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_weighted_loss_of_a_record_depends_on_no_other(task: str):
    """What a private step clips is that of the record alone, whatever its class."""
    shape = () if task == "classification" else (2, 2)
    logits, labels = draw(N, 3, *shape), classes(3, N, *shape)
    spec = training(task, options=WEIGHTED)
    whole = trained(spec, logits, labels).sum_of_means(N).item()
    alone = [trained(spec, logits[i : i + 1], labels[i : i + 1]) for i in range(N)]
    assert math.fsum(a.sum_of_means(1).item() for a in alone) == pytest.approx(whole)


def test_weights_are_as_many_as_outputs():
    spec = training("classification", options={"class_weights": [1, 2]})
    with pytest.raises(SiteError, match=r"class_weights .* the model has 3") as caught:
        trained(spec, draw(9, 3), classes(3, 9))
    assert "has 3" not in caught.value.outside


def test_weights_are_in_the_digest_of_the_job():
    plain, weighted = (
        small_job(training={"local_steps": 1, "options": options})
        for options in ({}, {"class_weights": [1, 2, 3]})
    )
    assert digest(plain) == digest(small_job(training={"local_steps": 1}))
    assert digest(weighted) != digest(plain)


@pytest.mark.parametrize("flat", [False, True])
def test_own_objective_that_returns_logits_has_every_measure(*, flat: bool):
    """The same as the built-in task; one logit for yes, or one for each class."""
    logits, labels = 2 * draw(N, 2), classes(2, N)
    keys = {"classes": ["no", "yes"], "measures": ["calibration", "recall_at_1"]}
    wanted = metrics_of(evaluated(training("classification", **keys), logits, labels))
    wanted |= metrics_of(
        evaluated(
            training("binary", measures=["auc"]), logits[:, 1] - logits[:, 0], labels
        )
    )
    inputs = logits[:, 1] - logits[:, 0] if flat else logits
    own = training(
        "support.users_module:with_logits",
        classes=["no", "yes"],
        measures=["auc", "calibration", "recall_at_1"],
        metrics={"hit": [0, 1]},
    )
    found = metrics_of(evaluated(own, inputs, labels.float() if flat else labels))
    for name in ("macro_f1", "mean_iou", "auc", "calibration_error", "recall_at_1"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-6), name
    assert found["hit"] == pytest.approx(found["recall_at_1"])


def test_own_objective_without_logits_is_told_so():
    own = training("support.users_module:without_logits", classes=["no", "yes"])
    assert trained(own, draw(N, 2), classes(2, N)).metrics == {}
    with pytest.raises(SiteError, match=r"must also return 'logits'"):
        evaluated(own, draw(N, 2), classes(2, N))


def test_multi_label():
    """Micro averages: over all labels of all records."""
    logits, labels = draw(N, 5), classes(2, N, 5)
    spec = training("multi_label")
    expected = functional.binary_cross_entropy_with_logits(logits, labels.float())
    assert (trained(spec, logits, labels).total / N).item() == pytest.approx(
        expected.item(), rel=1e-6
    )
    sums = evaluated(spec, logits, labels)
    said = (logits > 0).long()
    assert accuracy_of(sums) == sk().accuracy_score(labels, said)
    assert metrics_of(sums)["f1"] == pytest.approx(
        sk().f1_score(labels, said, average="micro"), rel=1e-6
    )


def test_classification():
    logits, labels = 2 * draw(N, 4), classes(4, N)
    spec = training(
        "classification",
        classes=["a", "b", "c", "d"],
        measures=["calibration", "recall_at_2", "recall_at_3"],
    )
    sums = evaluated(spec, logits, labels)
    means, said = metrics_of(sums), logits.argmax(1)
    assert means["macro_f1"] == pytest.approx(
        sk().f1_score(labels, said, average="macro")
    )
    for k in (2, 3):
        assert means[f"recall_at_{k}"] == pytest.approx(
            sk().top_k_accuracy_score(labels, logits, k=k)
        )
    confidence = logits.double().softmax(1).max(1).values
    assert means["calibration_error"] == pytest.approx(
        calibration_by_hand(confidence, said == labels)
    )
    assert not [name for name in means if name.startswith("calibration_1")]


def test_segmentation():
    """Pixels with the ignored label are no predictions."""
    logits, labels = draw(N, 3, 4, 4), classes(3, N, 4, 4)
    labels[RNG.random((N, 4, 4)) < 0.3] = 255
    spec = training(
        "segmentation", classes=["a", "b", "c"], options={"ignore_index": 255}
    )
    batch = trained(spec, logits, labels)
    expected = functional.cross_entropy(logits, labels, ignore_index=255)
    assert (batch.total / batch.count).item() == pytest.approx(
        expected.item(), rel=1e-5
    )
    sums = evaluated(spec, logits, labels)
    seen = labels != 255
    said = logits.argmax(1)[seen]
    assert sums.count == int(seen.sum())
    assert accuracy_of(sums) == sk().accuracy_score(labels[seen], said)
    assert metrics_of(sums)["mean_iou"] == pytest.approx(
        sk().jaccard_score(labels[seen], said, average="macro")
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_no_prediction_adds_more_than_the_clip_of_held_out_losses(value: float):
    """Also if the model makes NaN or infinity of it; for every task with a clip."""
    batches: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = {
        "classification": (draw(4, 3), classes(3, 4)),
        "segmentation": (draw(4, 3, 2, 2), classes(3, 4, 2, 2)),
        "masked_lm": (draw(4, 5, 3), classes(3, 4, 5)),
        "sft": (draw(4, 5, 3), classes(3, 4, 5)),
        "binary": (draw(4, 1), classes(2, 4)),
        "multi_label": (draw(4, 3), classes(2, 4, 3)),
    }
    for task, (logits, targets) in batches.items():
        objective, losses = objective_of(training(task)), []
        for _ in range(2):
            with torch.no_grad():
                found = objective(Same(), logits, targets, max_loss=0.5)
            assert 0 <= found.loss <= 0.5 * found.count, task
            losses.append(float(found.loss))
            logits[2].flatten()[0] = value
        assert abs(losses[1] - losses[0]) <= 0.5 * found.count / 4, task


@pytest.mark.parametrize("task", ["masked_lm", "seq2seq_lm", "sft"])
def test_labelled_tokens(task: str):
    """sft predicts the next token's label; the others that of their own place."""
    logits, labels = draw(40, 6, 5), classes(5, 40, 6)
    labels[RNG.random((40, 6)) < 0.5] = -100
    labels[3] = -100  # A record without any prediction.
    spec = training(task)
    batch = trained(spec, logits, labels)
    seen = (logits[:, :-1], labels[:, 1:]) if task == "sft" else (logits, labels)
    flat, wanted = seen[0].flatten(0, 1), seen[1].flatten()
    expected = functional.cross_entropy(flat, wanted)
    assert (batch.total / batch.count).item() == pytest.approx(
        expected.item(), rel=1e-5
    )
    right = flat.argmax(1)[wanted >= 0] == wanted[wanted >= 0]
    sums = evaluated(spec, logits, labels, step=9)
    assert accuracy_of(sums) == pytest.approx(right.float().mean().item())
    by_record = [
        functional.cross_entropy(x, y).item() if (y >= 0).any() else 0.0
        for x, y in zip(*seen, strict=True)
    ]
    assert batch.sum_of_means(40).item() == pytest.approx(sum(by_record), rel=1e-5)


def test_a_record_of_private_steps_does_not_depend_on_the_others_labels():
    """Were the sum over tokens divided by those of the batch, it would."""
    logits, labels = draw(2, 6, 5), classes(5, 2, 6)
    fewer = labels.clone()
    fewer[1, :5] = -100
    spec, grads = training("masked_lm"), []
    for each in (labels, fewer):
        given = logits.clone().requires_grad_()
        objective_of(spec)(Same(), given, each).sum_of_means(2).backward()
        assert given.grad is not None
        grads.append(given.grad[0])
    assert torch.equal(*grads)


def test_contrastive():
    """InfoNCE by hand; hits among the records of each batch."""
    first, second = draw(N, 8), draw(N, 8)
    second += first
    spec = training(
        "contrastive", options={"temperature": 0.5}, measures=["recall_at_5"]
    )
    batch = trained(spec, (first, second), None)
    logits = functional.normalize(first) @ functional.normalize(second).t() / 0.5
    places = torch.arange(N)
    expected = functional.cross_entropy(logits, places, reduction="sum")
    expected += functional.cross_entropy(logits.t(), places, reduction="sum")
    assert batch.total.item() == pytest.approx(expected.item() / 2, rel=1e-5)
    sums = evaluated(spec, (first, second), None, step=N)
    parts = [logits[:100, :100], logits[100:, 100:]]
    top = sum(sk().top_k_accuracy_score(range(len(p)), p, k=5) * len(p) for p in parts)
    assert metrics_of(sums)["recall_at_5"] == pytest.approx(top / N)


def test_ranking():
    better, worse = draw(N), draw(N)
    spec = training("ranking")
    batch = trained(spec, (better, worse), None)
    expected = functional.logsigmoid(better - worse).neg().sum()
    assert batch.total.item() == pytest.approx(expected.item(), rel=1e-6)
    sums = evaluated(spec, (better, worse), None)
    assert accuracy_of(sums) == pytest.approx((better > worse).float().mean().item())


FLOAT = torch.zeros(4, 2)
WRONG: Mapping[str, tuple[str, Tree, Tree, str]] = {
    "no targets": ("regression", FLOAT, None, "needs targets"),
    "broadcast": ("regression", torch.zeros(4, 1), torch.zeros(4, 4), "would compare"),
    "labels of yes": ("binary", torch.zeros(4), classes(2, 4) + 1, "must be 0 or 1"),
    "many logits": ("binary", FLOAT, FLOAT, "one logit per record"),
    "class of a pixel": (
        "segmentation",
        torch.zeros(1, 3, 2, 2),
        torch.full((1, 2, 2), 3),
        "from 0 to 2",
    ),
    # Not ignore_index, although other libraries take it for that.
    "label -1": ("masked_lm", torch.zeros(1, 2, 3), -torch.ones(1, 2).long(), "0 to 2"),
    "shape": ("masked_lm", FLOAT, classes(2, 4, 3), "a label for each place"),
    "float labels": ("sft", torch.zeros(1, 2, 5), torch.zeros(1, 2), "integer label"),
    "one tower": ("contrastive", FLOAT, None, "two tensors of embeddings"),
    "no pair": ("ranking", FLOAT, None, "inputs \\(better, worse\\)"),
    "scores": ("ranking", (FLOAT, FLOAT), None, "one score per record"),
}


@pytest.mark.parametrize("case", WRONG)
def test_misfits_are_explained(case: str):
    task, inputs, targets, text = WRONG[case]
    with pytest.raises(SiteError, match=text):
        trained(training(task), inputs, targets)


def test_long_record_is_refused():
    """Under secure aggregation the largest count follows from the job."""
    with pytest.raises(SiteError, match="predictions than the job's 3"):
        trained(training("sft", max_tokens=3), draw(1, 4, 5), classes(5, 1, 4))


SECURE = {"secure_aggregation": {"enabled": True, "two_sites_waiver": True}}
REFUSED: Mapping[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "option": (
        {"task": "regression", "options": {"los": "mse"}},
        {},
        "training.options.los",
        "its options are loss, delta",
    ),
    "value": (
        {"task": "regression", "options": {"loss": "mape"}},
        {},
        "training.options.loss",
        "one of mse, mae, huber",
    ),
    "metric of regression": (
        {"task": "regression", "metrics": {"r2": []}},
        {},
        "training.metrics.r2",
        "which reports loss, absolute_error",
    ),
    "unbounded in a secure sum": (
        {"task": "regression"},
        SECURE,
        "training.metrics.loss",
        "has no bounds",
    ),
    "measure of another task": (
        {"task": "ranking", "measures": ["auc"]},
        {},
        "training.measures[0]",
        "it is a measure of binary",
    ),
    "unknown measure": (
        {"measures": ["f2"]},
        {},
        "training.measures[0]",
        "the measures are auc",
    ),
    "classes of another task": (
        {"task": "binary", "classes": ["a", "b"]},
        {},
        "training.classes",
        "classification, segmentation or your",
    ),
    "weights of the site's own records": (
        {"options": {"class_weights": "balanced"}},
        {},
        "training.options.class_weights",
        'no "balanced": .* reveal its counts',
    ),
    "weight that is none": (
        {"options": {"class_weights": [1, 0]}},
        {},
        "training.options.class_weights",
        "numbers above 0",
    ),
    "weights of other classes": (
        {"classes": ["a", "b", "c"], "options": {"class_weights": [1, 2]}},
        {},
        "training.options.class_weights",
        "has 2 weights, .* names 3",
    ),
    "a whole label is spread": (
        {"options": {"label_smoothing": 1}},
        {},
        "training.options.label_smoothing",
        "below 1",
    ),
    "own metric with the name of a cell": (
        {
            "task": "support.users_module:with_logits",
            "classes": ["a", "b"],
            "metrics": {"confusion_0_1": []},
        },
        {},
        "training.metrics.confusion_0_1",
        "training.classes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_job_is_refused(case: str):
    keys, privacy, key, text = REFUSED[case]
    with pytest.raises(JobError, match=text) as caught:
        small_job(num_sites=2, training={"local_steps": 1, **keys}, privacy=privacy)
    assert caught.value.key == key


def test_records_of_built_in_tasks_are_compared():
    """The probe before private steps sees what mixes records in a task's values."""
    spec = training("multi_label")
    forward = results_by_record(objective_of(spec), spec, gradients=True)
    logits, labels = draw(4, 3), classes(2, 4, 3)
    values = forward(Same(), (logits, labels))
    assert isinstance(values, torch.Tensor)
    assert values.shape == (4,)
    assert math.isfinite(values.sum().item())
