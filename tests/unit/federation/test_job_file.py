"""Job files: what is read, what is refused, and what comes back."""

import difflib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support import toy

from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec

TOML = """
name = "toy"
rounds = 3
[model]
factory = "toy:model"
[data]
source = "toy:data"
[training]
local_steps = 2
[training.optimizer]
betas = [0.9, 0.99]
[[sites]]
name = "a"
[[sites]]
name = "b"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A job file."""
    path = tmp_path / "job.toml"
    path.write_text(TOML)
    return path


def refusal(changes: dict[str, Any]) -> JobError:
    """What a job with these keys is told."""
    with pytest.raises(JobError) as caught:
        toy.job(changes)
    return caught.value


# Reading a file.


def test_folder(tmp_path: Path):
    """A run's folder instead of its job."""
    with pytest.raises(JobError, match=r"cannot read .*: Is a directory"):
        job_file.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"name = ",
        b"\xff\xfe\x00garbage\x00",
        b"\x80\x04\x95",
        b"a = 1\na = 2",
        b"a = " + b"[" * 5000,
        b"a = " + b"9" * 5000,
    ],
)
def test_not_toml(tmp_path: Path, content: bytes):
    """Whatever the parser stumbles over."""
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(JobError, match="is not TOML: "):
        job_file.load(path)


def test_mark_of_the_encoding_is_read_over(tmp_path: Path):
    """Some editors begin a file with it."""
    path = tmp_path / "job.toml"
    path.write_text('name = "marked"', encoding="utf-8-sig")
    assert job_file.read_toml(path) == {"name": "marked"}


def test_text_that_is_not_toml():
    """Where there is no file to name."""
    with pytest.raises(JobError, match="the job is not TOML: "):
        job_file.loads("name = ")


def test_huge_file(tmp_path: Path):
    """Somebody named the data instead of the job."""
    path = tmp_path / "job.toml"
    path.write_bytes(b"#" * (job_file.MAX_JOB_FILE_BYTES + 1))
    with pytest.raises(JobError, match="is larger than 1048576 bytes"):
        job_file.load(path)


def test_endless_file():
    """It is not read to its end."""
    with pytest.raises(JobError, match="/dev/zero is larger than"):
        job_file.load(Path("/dev/zero"))


# Keys.


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"seeds": 1}, "seeds", "unknown key; did you mean 'seed'?"),
        (
            {"training": {"batchsize": 1}},
            "training.batchsize",
            "unknown key; did you mean 'batch_size'?",
        ),
        (
            {"training": {"local_steps": 1, "lr": 1.0}},
            "training.lr",
            "unknown key; did you mean 'training.optimizer.lr'?",
        ),
        (
            {"epochs": 1},
            "epochs",
            "unknown key; did you mean 'training.local_epochs'?",
        ),
        (
            {"target_epsilon": 8.0},
            "target_epsilon",
            "unknown key; did you mean 'privacy.differential_privacy.target_epsilon'?",
        ),
        (
            {"communication": {"zzz": 1}},
            "communication.zzz",
            "unknown key; known keys: codec, down_codec, fragments, down_content",
        ),
        (
            {"sites": [{"name": "a", "regoin": "x"}]},
            "sites[0].regoin",
            "unknown key; did you mean 'region'?",
        ),
        (
            {"simulation": {"faults": [{"kind": "crash"}]}},
            "simulation.faults[0].site",
            "is missing: Name of the site.",
        ),
        ({"model": {}, "data": 1}, "data", "must be a table, not 1"),
    ],
)
def test_refused_key(changes: dict[str, Any], key: str, text: str):
    """The key and the nearest that exists."""
    error = refusal(changes)
    assert (error.key, str(error)) == (key, f"{key}: {text}")


@pytest.mark.parametrize("name", ["name", "rounds", "model", "training", "sites"])
def test_missing_key(name: str):
    """It says what the key is for."""
    document = toy.document()
    del document[name]
    with pytest.raises(JobError, match=f"^{name}: is missing: [A-Z]"):
        job_file.parse(document)


def test_all_faults_are_named_at_once():
    """Those of reading, or those of the rules, which look at what was read."""
    error = refusal(
        {
            "rounds": "many",
            "sede": 1,
            "training": {"batch_size": 0, "optimiser": {}, "local_steps": 1},
        }
    )
    keys = [line.split(":")[0] for line in str(error).splitlines()]
    assert keys == [
        "sede",
        "also rounds",
        "also training.optimiser",
        "also training.batch_size",
    ]
    private = {"unit": "site", "max_noise_multiplier": 9.0}
    error = refusal({"privacy": {"differential_privacy": private}})
    assert [line.split(": ")[0] for line in str(error).splitlines()] == [
        "privacy.differential_privacy.unit",
        "also privacy.differential_privacy.max_noise_multiplier",
        "also privacy.differential_privacy.target_epsilon",
    ]
    for key in ("secure_aggregation.enabled", "held_out", "aggregation.weights"):
        assert key in error.reason.splitlines()[0]


def test_faults_of_several_rules_come_in_their_order():
    error = refusal(
        {
            "training": {"local_steps": 1, "accumulate_from": [[2]]},
            "evaluation": {"every": 0},
            "aggregation": {"weights": "dynamic", "combine": "medain"},
        }
    )
    assert [line.split(": ")[0] for line in str(error).splitlines()] == [
        "aggregation.weights",
        "also training.accumulate_from[0]",
        "also aggregation.combine",
    ]


def test_a_stranger_cannot_ask_for_many_faults(monkeypatch: pytest.MonkeyPatch):
    """Each unknown key is compared with all known ones."""
    compared: list[str] = []
    nearest = difflib.get_close_matches

    def counted(word: str, *others: Any, **options: Any) -> list[str]:
        compared.append(word)
        return nearest(word, *others, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    error = refusal({f"key{index}": 1 for index in range(1000)})
    assert len(str(error).splitlines()) == len(compared) == 10


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"aggregation": {"combine": "medain"}},
            (
                "aggregation.combine: 'medain' is not a choice and not of the form "
                "module:function or ./file.py:function: did you mean 'median'?"
            ),
        ),
        (
            {"aggregation": {"weights": "exmaples"}},
            "aggregation.weights: 'exmaples' is not a choice; did you mean 'examples'?",
        ),
        (
            {"sites": [{"name": "a", "cloud": "zz"}]},
            "sites[0].cloud: 'zz' is not a choice; choose aws, gcp or local",
        ),
    ],
)
def test_refused_word(changes: dict[str, Any], text: str):
    """What it may be instead."""
    assert str(refusal(changes)).startswith(text)


# Values.


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rounds": True}, "rounds: must be a whole number, not true"),
        ({"rounds": 3.0}, "rounds: must be a whole number, not 3.0"),
        ({"rounds": "3"}, "rounds: must be a whole number, not '3'"),
        ({"rounds": None}, "rounds: must be a whole number, not None"),
        ({"rounds": [3]}, "rounds: must be a whole number, not a list"),
        ({"rounds": (3,)}, "rounds: must be a whole number, not a list"),
        ({"name": {"a": 1}}, "name: must be a text, not a table"),
        ({"name": 2**63}, "name: must fit into 64 bits, with its sign"),
        ({"seed": 2**63}, "seed: must fit into 64 bits, with its sign"),
        ({"rounds": 10**9 + 1}, "rounds: must be at most 1000000000, not 1000000001"),
        (
            {"training": {"proximal_mu": 16**9999}},
            "training.proximal_mu: must fit into 64 bits, with its sign",
        ),
        (
            {"training": 16**9999},
            "training: must be a table, not a number of more than 64 bits",
        ),
        (
            {"training": {"proximal_mu": True}},
            "training.proximal_mu: must be a number, not true",
        ),
        (
            {"training": {"proximal_mu": float("nan")}},
            "training.proximal_mu: must be a finite number, not nan",
        ),
        (
            {"training": {"proximal_mu": float("inf")}},
            "training.proximal_mu: must be a finite number, not inf",
        ),
        (
            {"training": {"optimizer": {"nesterov": 1}}},
            "training.optimizer.nesterov: must be true or false, not 1",
        ),
        (
            {"training": {"optimizer": {"betas": 0.9}}},
            "training.optimizer.betas: must be a list, not 0.9",
        ),
        (
            {"training": {"optimizer": {"betas": [0.9, "x"]}}},
            "training.optimizer.betas[1]: must be a number, not 'x'",
        ),
        ({"sites": {"name": "a"}}, "sites: must be a list, not a table"),
        ({"sites": ["a"]}, "sites[0]: must be a table, not 'a'"),
        (
            {"model": {"options": [1]}},
            "model.options: must be a table, not a list",
        ),
        (
            {"model": {"integer_buffers": {"*": ["keep"]}}},
            "model.integer_buffers.*: must be a text, not a list",
        ),
        ({"name": "x" * 999}, f"name: 'x{'x' * 79}' is not a name"),
    ],
)
def test_refused_type(changes: dict[str, Any], text: str):
    """What it must be, and what it was."""
    assert str(refusal(changes)).startswith(text)


@pytest.mark.parametrize(
    ("table", "key", "value", "text"),
    [
        ("training", "batch_size", 0, "must be at least 1, not 0"),
        ("training", "accumulate", -1, "must be at least 1, not -1"),
        ("training", "clip_grad_norm", 0, "must be above 0.0, not 0.0"),
        ("schedule", "round_deadline_seconds", 0, "must be above 0.0, not 0.0"),
        ("evaluation", "every", -1, "must be at least 0, not -1"),
        ("storage", "keep_checkpoints", 0, "must be at least 1, not 0"),
        ("simulation", "workers", -1, "must be at least 0, not -1"),
    ],
)
def test_refused_range(table: str, key: str, value: float, text: str):
    """The bound and the value."""
    assert str(refusal({table: {key: value}})) == f"{table}.{key}: {text}"


# Options of factories.


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("2024-01-01", "model.options.x: must be a whole number, a number, true or"),
        ("[{y = 10:00:00}]", "model.options.x[0].y: must be"),
        ("nan", "model.options.x: must be a finite number, not nan"),
        ("{y = [inf]}", "model.options.x.y[0]: must be a finite number, not inf"),
    ],
)
def test_refused_option(toml: str, text: str):
    """No checkpoint could record it."""
    with pytest.raises(JobError) as caught:
        job_file.loads(TOML.replace("[data]", f"options.x = {toml}\n[data]"))
    assert str(caught.value).startswith(text)


# Overrides.


def overridden(path: Path, *overrides: str) -> dict[str, Any]:
    """The document of a job after ``--set``."""
    return job_file.document(job_file.load(path, overrides))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rounds=5", {"rounds": 5}),
        (" rounds = 5 ", {"rounds": 5}),
        ("name=other", {"name": "other"}),
        ('name="other"', {"name": "other"}),
        ("data.partition.alpha=2", {"data": {"partition": {"alpha": 2.0}}}),
        (
            'data.partition={kind = "dirichlet", alpha = 0.5}',
            {"data": {"partition": {"kind": "dirichlet", "alpha": 0.5}}},
        ),
        ("model.options.a.b=[1, 2]", {"model": {"options": {"a": {"b": [1, 2]}}}}),
        ("model.options.url=a=b", {"model": {"options": {"url": "a=b"}}}),
        (
            "training.optimizer.betas.1=0.5",
            {"training": {"optimizer": {"betas": [0.9, 0.5]}}},
        ),
        ("aggregation.weights=uniform", {"aggregation": {"weights": "uniform"}}),
    ],
)
def test_override(path: Path, override: str, expected: dict[str, Any]):
    """It replaces one key and makes the tables that it needs."""
    before = job_file.document(job_file.load(path))
    assert overridden(path, override) == toy.merged(before, expected)


def test_overrides_in_a_list_of_tables(path: Path):
    """Entries count from 0."""
    sites = overridden(path, "sites.1.name=z", "sites.1.cloud=aws")["sites"]
    assert [(site["name"], site["cloud"]) for site in sites] == [
        ("a", "local"),
        ("z", "aws"),
    ]


@pytest.mark.parametrize(
    "override", ["sites.0=", "sites.0.region=", "seed=", "x.y.z=", "data.nothing.x="]
)
def test_empty_value_takes_out(path: Path, override: str):
    """What is not there need not be taken out."""
    job = job_file.load(path, [override])
    expected = 1 if override == "sites.0=" else 2
    assert len(job.sites) == expected
    assert job.sites[-1].name == "b"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rounds", "cannot set 'rounds': write key=value, for example rounds=3"),
        ("=3", "cannot set '=3': write key=value"),
        ("rounds.x=1", "rounds: is 3, not a table"),
        ("sites.2.name=x", "sites.2: has no entry '2': count from 0 to 1"),
        ("sites.x=1", "sites.x: has no entry 'x': count from 0 to 1"),
        ("sites.-1.name=x", "sites.-1: has no entry '-1': count from 0 to 1"),
        (f"sites.{'1' * 5000}=1", "has no entry"),
        ("rounds=many", "rounds: must be a whole"),
        ("rounds=" + "9" * 5000, "rounds: must be a whole"),
        ("training.optimizer.betas=[0.9", "a list, not '[0.9'"),
        ("roudns=3", "roudns: unknown key; did you"),
        ("a..b=3", "a: unknown key"),
    ],
)
def test_refused_override(path: Path, override: str, text: str):
    """The same messages as for a file."""
    with pytest.raises(JobError) as caught:
        job_file.load(path, [override])
    assert text in str(caught.value)


def test_entry_of_an_empty_list(path: Path):
    """There is nothing to count."""
    overrides = ["sites=[]", "sites.0.name=x"]
    with pytest.raises(JobError, match="has no entry '0': the list is empty"):
        job_file.load(path, overrides)


# There and back.

_fractions = st.floats(0, 0.99)
_positive = st.floats(1e-6, 1e6)
_values = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | _positive | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
_documents = st.fixed_dictionaries(
    {},
    optional={
        "rounds": st.integers(1, 10**9),
        "seed": st.integers(0, 2**63 - 1),
        "model": st.fixed_dictionaries(
            {"factory": st.text(max_size=9)},
            optional={"options": st.dictionaries(st.text(max_size=5), _values)},
        ),
        "training": st.fixed_dictionaries(
            {"local_steps": st.integers(1, 99)},
            optional={
                "clip_grad_norm": _positive,
                "optimizer": st.fixed_dictionaries(
                    {"betas": st.lists(_fractions, min_size=2, max_size=2)},
                    optional={"lr": _positive | st.integers(1, 9)},
                ),
            },
        ),
        "schedule": st.fixed_dictionaries(
            {}, optional={"minimum_sites": st.integers(1, 3)}
        ),
        "simulation": st.fixed_dictionaries(
            {"faults": st.just([{"site": "a", "kind": "hang", "rounds": [2]}])}
        ),
    },
)


@given(_documents)
def test_document_and_back(changes: dict[str, Any]):
    """A job is the same after it was spelled out."""
    job = toy.job(changes)
    assert job_file.parse(job_file.document(job)) == job


def test_document_spells_out_every_default():
    """Only what has no value is left out."""
    document = job_file.document(toy.job())
    assert set(document) == set(JobSpec.__dataclass_fields__) - {
        "selection",
        "statistics",
    }
    assert document["training"]["optimizer"]["betas"] == [0.9, 0.999]
    assert "clip_grad_norm" not in document["training"]


def test_differences_name_the_keys():
    """With both values; lists of tables entry by entry."""
    mine = job_file.document(toy.job({"model": {"options": {"a": 1, "b": True}}}))
    other = job_file.document(
        toy.job(
            {"model": {"options": {"a": 1.0, "b": 1}}, "rounds": 4}, sites=["c", "a"]
        )
    )
    assert [line.partition(":")[0] for line in job_file.differences(mine, other)] == [
        "model.options.a",
        "model.options.b",
        "rounds",
        "sites[2].cloud",
        "sites[2].name",
        "sites[2].region",
    ]
    assert job_file.differences(mine, other)[2] == "rounds: 3 here, 4 there"
