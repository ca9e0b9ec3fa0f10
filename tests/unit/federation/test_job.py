"""What a job refuses, and why."""

import dataclasses
import itertools
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from support import toy

from federation.errors import JobError
from federation.job import (
    flower_app_job,
    job_file,
    privacy_job,
    selection_job,
    spec as jobs,
    statistics_job,
    storage_job,
)
from federation.job.job_keys import documented
from federation.job.spec import JobSpec


def robust(rule: str, **aggregation: Any) -> dict[str, Any]:
    """A job with a robust rule."""
    return {"aggregation": {"combine": rule, "weights": "uniform", **aggregation}}


def fault(**fields: Any) -> dict[str, Any]:
    """A job that rehearses a misfortune."""
    return {"simulation": {"faults": [{"kind": "crash", "site": "a"} | fields]}}


def secret(**keys: Any) -> dict[str, Any]:
    """Secure aggregation with some keys set."""
    return {"privacy": {"secure_aggregation": {"enabled": True, **keys}}}


def private(**changes: Any) -> dict[str, Any]:
    """Record-level differential privacy, and what else to change."""
    return {
        "aggregation": {"weights": "uniform"},
        "privacy": {"differential_privacy": {"unit": "record", "target_epsilon": 8.0}},
    } | changes


def proportional(*speeds: float) -> dict[str, Any]:
    """A job whose data is dealt out by speed."""
    deal = {"kind": "proportional", "speeds": list(speeds)}
    return {"data": {"source": "m:f", "partition": deal}}


def with_app(changes: dict[str, Any] | None = None, **app: Any) -> dict[str, Any]:
    """A job one of whose sites runs an app of Flower."""
    sites = [{"name": "a"}, {"name": "b", "flower_app": app}]
    return {"sites": sites} | (changes or {})


def own(task: str = "m:f", *, table: Any = None, **metrics: Any) -> dict[str, Any]:
    """A job with an objective of the user's own, and other tables."""
    training = {"local_steps": 1, "task": task, "metrics": metrics}
    return {"training": training} | (table or {})


def classes(*names: str) -> dict[str, Any]:
    """A job that asks for a confusion matrix."""
    return {"training": {"local_steps": 1, "classes": list(names)}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "task": (own("regresion"), "training.task", "none of classification"),
    "metrics of a built-in task": (
        own("causal_lm", error=[0.0, 1.0]),
        "training.metrics",
        "reports its own metrics",
    ),
    "not a metric name": (
        own(Error=[]),
        "training.metrics.Error",
        "not a metric name",
    ),
    "taken name": (
        own(loss_sum=[]),
        "training.metrics.loss_sum",
        "not a metric name",
    ),
    "name of right predictions": (
        own(correct=[0.0, 40.0]),
        "training.metrics.correct",
        "not a metric name",
    ),
    "classes of another task": (
        {"training": {"local_steps": 1, "task": "causal_lm", "classes": ["a", "b"]}},
        "training.classes",
        "set training.task to classification",
    ),
    "class twice": (classes("a", "b", "a"), "training.classes", "2 to 32 different"),
    "one class": (classes("a"), "training.classes", "2 to 32 different"),
    "too many classes": (
        classes(*(f"c{i}" for i in range(33))),
        "training.classes",
        "2 to 32 different",
    ),
    "class that is no text": (
        classes("a", "b\x1b[2J"),
        "training.classes",
        "printable names",
    ),
    "class without a name": (classes("a", ""), "training.classes", "printable names"),
    "one bound": (own(error=[1.0]), "training.metrics.error", "[low, high]"),
    "bounds the wrong way": (
        own(error=[1.0, 1.0]),
        "training.metrics.error",
        "[low, high]",
    ),
    "loss below 0": (own(loss=[-1.0, 1.0]), "training.metrics.loss", "starts below 0"),
    "too many metrics": (
        own(**{f"m{i}": [] for i in range(17)}),
        "training.metrics",
        "more than 16",
    ),
    "noise on an unbounded metric": (
        own(table=private(), loss=[0.0, 1.0], error=[]),
        "training.metrics.error",
        "differential privacy adds noise",
    ),
    "noise on an unbounded loss": (
        own(table=private(), error=[0.0, 1.0]),
        "training.metrics.loss",
        "has no bounds",
    ),
    "secure sum of an unbounded metric": (
        own(table=secret(max_examples=9), loss=[0.0, 1.0], error=[]),
        "training.metrics.error",
        "secure aggregation sums it without seeing",
    ),
    "name": ({"name": "My Job"}, "name", "'My Job' is not a name: use 1 to 64"),
    "no site": ({"sites": []}, "sites", "add at least one"),
    "site name": (
        {"sites": [{"name": "a"}, {"name": "B"}]},
        "sites[1].name",
        "'B' is not a name",
    ),
    "site twice": (
        {"sites": [{"name": "a"}, {"name": "a"}]},
        "sites[1].name",
        "another site or relay is called 'a'",
    ),
    "speeds of an equal deal": (
        {"data": {"source": "m:f", "partition": {"speeds": [1.0]}}},
        "data.partition.speeds",
        "has no effect with 'iid'",
    ),
    "speeds of some sites": (
        proportional(1.0, 2.0),
        "data.partition.speeds",
        "has 2 numbers for the 3 sites",
    ),
    "speed of nothing": (
        proportional(1.0, 0.0, 2.0),
        "data.partition.speeds",
        "every speed must be above 0",
    ),
    "steps and epochs": (
        {"training": {"local_epochs": 1}},
        "training.local_steps",
        "set exactly one of local_steps and local_epochs",
    ),
    "device": (
        {"training": {"device": "tpu"}},
        "training.device",
        "'tpu' is not a device: use auto, cpu, cuda or cuda:N",
    ),
    "device without number": (
        {"training": {"device": "cuda:x"}},
        "training.device",
        "'cuda:x' is not a device",
    ),
    "momentum of adam": (
        {"training": {"optimizer": {"name": "adam", "momentum": 0.9}}},
        "training.optimizer.momentum",
        "'adam' has no momentum: use betas",
    ),
    "Nesterov's adam": (
        {"training": {"optimizer": {"name": "adamw", "nesterov": True}}},
        "training.optimizer.nesterov",
        "'adamw' has no Nesterov form",
    ),
    "Nesterov without momentum": (
        {"training": {"optimizer": {"nesterov": True}}},
        "training.optimizer.nesterov",
        "Nesterov needs a momentum above 0",
    ),
    "Muon without momentum": (
        {"training": {"optimizer": {"name": "muon"}}},
        "training.optimizer.momentum",
        "'muon' orthogonalises a momentum: set one above 0; 0.95 is usual",
    ),
    "Nesterov's Muon": (
        {
            "training": {
                "optimizer": {"name": "muon", "momentum": 0.9, "nesterov": True}
            }
        },
        "training.optimizer.nesterov",
        "'muon' always takes Nesterov's form: remove this key",
    ),
    "matrices for AdamW without Muon": (
        {"training": {"optimizer": {"name": "adam", "adamw_parameters": ["head.*"]}}},
        "training.optimizer.adamw_parameters",
        "has no effect with 'adam', which steps all parameters: remove this key",
    ),
    "one beta": (
        {"training": {"optimizer": {"betas": [0.9]}}},
        "training.optimizer.betas",
        "give two numbers, each at least 0 and below 1",
    ),
    "beta of 1": (
        {"training": {"optimizer": {"betas": [0.9, 1]}}},
        "training.optimizer.betas",
        "give two numbers, each at least 0 and below 1",
    ),
    "cohort too large": (
        {"schedule": {"sites_per_round": 4}},
        "schedule.sites_per_round",
        "cannot draw 4 of 3 sites",
    ),
    "quorum above all sites": (
        {"schedule": {"minimum_sites": 4}},
        "schedule.minimum_sites",
        "4 sites can never answer: a round has 3",
    ),
    "quorum above the cohort": (
        {"schedule": {"minimum_sites": 3, "sites_per_round": 2}},
        "schedule.minimum_sites",
        "3 sites can never answer: a round has 2",
    ),
    "buffer of more than all sites": (
        {"schedule": {"mode": "buffered", "buffer_size": 4}},
        "schedule.buffer_size",
        "4 updates never come together",
    ),
    "grace where all sites must answer": (
        {"schedule": {"grace": 0.5}},
        "schedule.grace",
        "has no effect, since a round needs all its sites: set minimum_sites",
    ),
    "grace that is another word": (
        {"schedule": {"minimum_sites": 2, "grace": "learned"}},
        "schedule.grace",
        "'learned' is not a choice; did you mean 'learnt'? choose learnt or a number",
    ),
    "grace that is a number in quotes": (
        {"schedule": {"minimum_sites": 2, "grace": "0.25"}},
        "schedule.grace",
        "choose learnt or a number",
    ),
    "grace below zero": (
        {"schedule": {"minimum_sites": 2, "grace": -0.5}},
        "schedule.grace",
        "must be at least 0",
    ),
    "grace that is no number": (
        {"schedule": {"minimum_sites": 2, "grace": float("nan")}},
        "schedule.grace",
        "must be a finite number",
    ),
    "grace of another type": (
        {"schedule": {"minimum_sites": 2, "grace": True}},
        "schedule.grace",
        "must be a number",
    ),
    "learnt grace where all sites must answer": (
        {"schedule": {"grace": "learnt"}},
        "schedule.grace",
        "has no effect, since a round needs all its sites",
    ),
    "fewer steps at most than on average": (
        {"schedule": {"allocation": "capacity", "max_local_steps": 2}}
        | {"training": {"local_steps": 3}},
        "schedule.max_local_steps",
        "sites take 3 steps on average",
    ),
    "trimmed mean of too few": (
        robust("trimmed_mean", byzantine_sites=2),
        "schedule.minimum_sites",
        "trimmed_mean withstands 2 bad sites only with at least 5 answers",
    ),
    "median of too few": (
        robust("median", byzantine_sites=2),
        "schedule.minimum_sites",
        "median withstands 2 bad sites only with at least 5 answers",
    ),
    "trimmed mean that trims nothing": (
        robust("trimmed_mean"),
        "aggregation.byzantine_sites",
        "trimmed_mean tolerates the number of bad sites given here, and",
    ),
    "krum of too few": (
        robust("krum", byzantine_sites=1),
        "schedule.minimum_sites",
        "krum withstands 1 bad sites only with at least 5 answers",
    ),
    "krum with a small quorum": (
        robust("multi_krum", byzantine_sites=1) | {"schedule": {"minimum_sites": 2}},
        "schedule.minimum_sites",
        "at least 5 answers, and the quorum is 2",
    ),
    "role of a buffer": (
        {"model": {"integer_buffers": {"*count": "mean"}}},
        "model.integer_buffers.*count",
        "'mean' is not a role: use keep, max or from_server",
    ),
    "fault of no site": (
        fault(site="z"),
        "simulation.faults[0].site",
        "there is no site 'z'; the sites are a, b, c",
    ),
    "fault in round 0": (
        fault(rounds=[3, 0]),
        "simulation.faults[0].rounds",
        "rounds count from 1, not 0",
    ),
    "metrics for an unknown tracker": (
        {"simulation": {"live_metrics": ["mlflow", "wandb"]}},
        "simulation.live_metrics[1]",
        "must be tensorboard or mlflow, each once at most, not 'wandb'",
    ),
    "metrics for a tracker twice": (
        {"simulation": {"live_metrics": ["mlflow", "mlflow"]}},
        "simulation.live_metrics[1]",
        "each once at most",
    ),
    "a rule that nobody knows": (
        {"aggregation": {"combine": "meen"}},
        "aggregation.combine",
        "did you mean 'mean'?",
    ),
    "a key of another codec": (
        {"communication": {"codec": {"name": "int4", "fraction": 0.5}}},
        "communication.codec.fraction",
        "it has no effect with int4: remove this key",
    ),
    "feedback of what leaves nothing out": (
        {"communication": {"codec": {"feedback": 1.0}}},
        "communication.codec.feedback",
        "it has no effect with identity: remove this key",
    ),
    "a key of another codec on the way down": (
        {"communication": {"down_codec": {"name": "fp16", "block": 4}}},
        "communication.down_codec.block",
        "it has no effect with fp16: remove this key",
    ),
    "a whole model in few bits": (
        {"communication": {"down_codec": {"name": "int8"}}},
        "communication.down_codec.name",
        'int8 loses most of a whole model: set communication.down_content = "change"',
    ),
    "secret sum with another quorum": (
        {"schedule": {"minimum_sites": 2}} | secret(),
        "schedule.minimum_sites",
        "with secure aggregation the threshold is the quorum: remove this key",
    ),
    "ring of odd width": (
        secret(ring_bits=20),
        "privacy.secure_aggregation.ring_bits",
        "20 bits are not supported: choose 16, 24 or 32",
    ),
    "16 bits for 17 sites": (
        {"sites": [{"name": f"s{number}"} for number in range(17)]}
        | secret(ring_bits=16),
        "privacy.secure_aggregation.ring_bits",
        "16 bits are too coarse for 17 sites, beyond 16: use 24 or 32",
    ),
    "bound of elements above the norm": (
        secret(clip_norm=1.0, element_bound=1.5),
        "privacy.secure_aggregation.element_bound",
        "no element exceeds clip_norm = 1.0: choose a smaller value",
    ),
    "secret sum of one": (
        {"sites": [{"name": "a"}]} | secret(),
        "sites",
        "a sum over one site hides nothing: name at least two",
    ),
    "secret sum of 65": (
        {"sites": [{"name": f"s{number}"} for number in range(65)]} | secret(),
        "sites",
        "secure aggregation is for at most 64 sites, not 65",
    ),
    "secret sum of two": (
        {"sites": [{"name": "a"}, {"name": "b"}]} | secret(),
        "privacy.secure_aggregation.two_sites_waiver",
        "each of two sites can compute the other's update; true accepts that",
    ),
    "threshold that lets two sums open": (
        {"sites": [{"name": name} for name in "abcde"]} | secret(threshold=3),
        "privacy.secure_aggregation.threshold",
        "3 of 5 sites is not from 4 to 5: with fewer, a dishonest aggregator could",
    ),
    "a unit without epsilon": (
        {
            "aggregation": {"weights": "uniform"},
            "privacy": {"differential_privacy": {"unit": "record"}},
        },
        "privacy.differential_privacy.target_epsilon",
        "without a bound on epsilon guarantees nothing",
    ),
    "data of an app": (
        {"sites": [{"name": "a", "flower_app": {}, "data": {"source": "m:f"}}]},
        "sites[0].data",
        "brings its own data",
    ),
    "app without a name for its arrays": (
        with_app(arrays=""),
        "sites[1].flower_app.arrays",
        "must not be empty",
    ),
    "app without a name for its accuracy": (
        with_app(eval_accuracy=""),
        "sites[1].flower_app.eval_accuracy",
        "must not be empty",
    ),
    "one record for two things": (
        with_app(config="arrays"),
        "sites[1].flower_app.config",
        "'arrays' cannot be two records of one message",
    ),
    "app's own number of the round": (
        with_app(settings={"server-round": 1}),
        "sites[1].flower_app.settings.server-round",
        "is reserved for the round number",
    ),
    "app's table of settings": (
        with_app(settings={"model": {"depth": 3}}),
        "sites[1].flower_app.settings.model",
        "a Flower record has no tables",
    ),
    "mean over contributors of whole updates": (
        {"aggregation": {"combine": "contributor_mean"}},
        "aggregation.combine",
        "use mean, or top_k",
    ),
    "threshold beyond the sites": (
        secret(threshold=4),
        "privacy.secure_aggregation.threshold",
        "4 of 3 sites is not from 3 to 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    """With the key, and what to write instead."""
    changes, key, text = REFUSED[case]
    with pytest.raises(JobError) as caught:
        toy.job(changes)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: ")
    assert text in str(caught.value)


def test_neither_steps_nor_epochs():
    """How long a site trains must be said."""
    document = toy.document()
    del document["training"]["local_steps"]
    with pytest.raises(JobError, match="set exactly one") as caught:
        job_file.parse(document)
    assert caught.value.key == "training.local_steps"


def test_rate_schedule_over_epochs():
    """How many steps they are differs from site to site."""
    rate = {"learning_rate": {"name": "cosine"}, "local_epochs": 1}
    with pytest.raises(JobError, match="'cosine' needs to know how") as caught:
        job_file.parse(toy.document() | {"training": rate})
    assert caught.value.key == "training.learning_rate.name"


ACCEPTED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one site": {"sites": [{"name": "a"}]},
    "schedule over steps": {"training": {"learning_rate": {"name": "linear"}}},
    "device": {"training": {"device": "cuda:11"}},
    "Nesterov": {"training": {"optimizer": {"nesterov": True, "momentum": 0.9}}},
    "cohort and quorum": {"schedule": {"sites_per_round": 2, "minimum_sites": 1}},
    "median": robust("median", byzantine_sites=1),
    "own rule with weights": {"aggregation": {"combine": "rules:mean"}},
    "trimmed mean": robust("trimmed_mean", byzantine_sites=1),
    "krum": robust("krum", byzantine_sites=1)
    | {"sites": [{"name": name} for name in "abcde"]},
    "dynamic weights": {"aggregation": {"weights": "dynamic"}},
    "buffers": {"model": {"integer_buffers": {"*": "keep", "b": "max"}}},
    "faults": fault(rounds=[1, 99], every=2),
    "secret sum": secret(),
    "secret sum of two, waived": {"sites": [{"name": "a"}, {"name": "b"}]}
    | secret(two_sites_waiver=True),
    "secret sum with dropouts": {"sites": [{"name": name} for name in "abcde"]}
    | secret(threshold=4, ring_bits=16),
    "secret sum of sixteen in 16 bits": {
        "sites": [{"name": f"s{number}"} for number in range(16)]
    }
    | secret(ring_bits=16),
    "secret sum with bounded elements": secret(
        clip_norm=1.0, element_bound=1.0, clip_elements=True
    ),
    "its quorum said twice": {"schedule": {"minimum_sites": 3}} | secret(),
    "private": private(),
    "private, secret sum of two": private(sites=[{"name": "a"}, {"name": "b"}])
    | {
        "privacy": {
            "secure_aggregation": {"enabled": True},
            "differential_privacy": {"unit": "record", "target_epsilon": 1.0},
        }
    },
    "app of Flower": with_app(settings={"lr": 0.1, "mode": "fast", "warm": True}),
    "app that does not evaluate": with_app(evaluate=False, eval_accuracy=""),
    "app of Flower with an objective": own(table=with_app(eval_accuracy="")),
    "app of Flower with a regression": with_app(
        {"training": {"local_steps": 1, "task": "regression"}}, eval_accuracy=""
    ),
    "objective without metrics": own(),
    "metric without bounds": own(error=[]),
    "metric with bounds": own(table=private(), loss=[0.0, 1.0], error=[-1.0, 1.0]),
    "no secure aggregation": {"privacy": {"secure_aggregation": {"enabled": False}}},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case: str):
    """What is just inside the rules."""
    assert isinstance(toy.job(ACCEPTED[case]), JobSpec)


def test_own_data_of_every_site_is_enough():
    """Then nothing is dealt out."""
    document = toy.document()
    del document["data"]
    for site in document["sites"]:
        site["data"] = {"source": "toy:data"}
    assert job_file.parse(document).data is None


def test_apps_bring_their_own_data():
    """Then, too, nothing is dealt out."""
    document = toy.document() | with_app()
    del document["data"]
    document["sites"][0]["flower_app"] = {}
    assert job_file.parse(document).data is None


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, (3, 3)),
        ({"sites_per_round": 2}, (2, 2)),
        ({"minimum_sites": 1}, (3, 1)),
        ({"sites_per_round": 2, "minimum_sites": 1}, (2, 1)),
    ],
)
def test_quorum_and_cohort(schedule: dict[str, int], expected: tuple[int, int]):
    """All that are asked must answer, unless the job says otherwise."""
    job = toy.job({"schedule": schedule})
    assert (job.cohort_size, job.minimum_sites) == expected


def specs(cls: type[Any] = JobSpec) -> Iterator[type[Any]]:
    """Every table of the job file."""
    yield cls
    for hint in typing.get_type_hints(cls).values():
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                yield from specs(typing.cast("type[Any]", inner))


def test_every_key_and_nothing_else_is_documented():
    """In whole sentences; the reference page is made of them."""
    for cls in dict.fromkeys(specs()):
        _, said = documented(cls)
        assert list(said) == [field.name for field in dataclasses.fields(cls)], cls
        cut = [name for name, text in said.items() if not text.endswith(".")]
        assert cut == [], cls


def test_every_default_is_a_choice():
    """A job is never refused for a key that it leaves out."""
    for field in itertools.chain(*map(dataclasses.fields, dict.fromkeys(specs()))):
        choices = field.metadata.get("choices", ())
        if choices and field.default not in {dataclasses.MISSING, None}:
            assert field.default in choices, field.name
        planned = set(field.metadata.get("planned", ()))
        assert not set(choices) & planned, field.name


def test_all_specs_are_found():
    """The walk over the tables reaches the deepest ones."""
    found = {cls.__name__ for cls in specs()}
    modules = (jobs, privacy_job, selection_job, storage_job, flower_app_job)
    modules += (statistics_job,)
    names = {n: v for module in modules for n, v in vars(module).items()}
    there = {n for n, v in names.items() if dataclasses.is_dataclass(v)}
    assert found == there


def test_every_table_is_documented():
    """By the docstring of its class."""
    assert all(documented(cls)[0].endswith(".") for cls in specs())
