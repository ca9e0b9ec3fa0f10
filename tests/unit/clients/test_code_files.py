"""Functions in files of a user: ``./my_model.py:net``."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.without_report import simulate

from clients.factories import import_factory
from clients.privacy import site_policy
from clients.privacy.policy_spec import PolicySpec
from federation.errors import JobError
from federation.ids import SiteId
from federation.job import code_files, job_digest, job_file

MODEL = """
import torch
from .layers import head

calls = 0

def net(hidden=8):
    return torch.nn.Sequential(torch.nn.Linear(2, hidden), head(hidden))
"""
LAYERS = """
import torch
from .deep.down import NUM

def head(hidden):
    return torch.nn.Linear(hidden, NUM)
"""
WORK = """
import numpy as np
from torch.nn import functional

def rings(n=80):
    x = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    y = (np.linalg.norm(x, axis=1) > 1.2).astype(np.int64)
    return (x, y), (x[:20], y[:20])

def focal(model, x, y):
    loss = functional.cross_entropy(model(x), y, reduction="none")
    return {"loss": loss, "half": loss / 2}
"""
JOB = """
name = "files"
rounds = 1
model = { factory = "./my_model.py:net" }
data = { source = "./lab/mine.py:rings" }
sites = [{ name = "a" }, { name = "b" }]
[training]
local_steps = 1
task = "./lab/mine.py:focal"
metrics = { half = [0, 10] }
"""
SHA = "[0-9a-f]{64}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder; it is not the working folder, and on no path."""
    files = {
        "my_model.py": MODEL,
        "layers.py": LAYERS,
        "deep/down.py": "NUM = 2\n",
        "lab/mine.py": WORK,
        "job.toml": JOB,
        "alone.py": "def net(): ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv(code_files.FOLDERS, "/nowhere")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return tmp_path


def pinned(folder: Path, text: str = "./my_model.py:net") -> str:
    document = {"model": {"factory": text}}
    code_files.pin(document, folder)
    return document["model"]["factory"]


def test_a_job_of_files_runs(folder: Path):
    """Paths are relative to the job file; neighbours are imported with a dot."""
    job = job_file.load(folder / "job.toml")
    result = simulate(job)
    assert result.status == "completed"
    assert result.metrics["half"] == pytest.approx(result.loss / 2)
    assert re.fullmatch(rf"\./my_model\.py@{SHA}:net", job.model.factory)
    assert not any(name in sys.modules for name in ("my_model", "mine", "layers"))
    for place in sorted(folder.rglob("*")):
        assert place.name != "__pycache__"


@pytest.mark.parametrize("name", ["my_model.py", "layers.py", "deep/down.py"])
def test_the_digest_of_a_job_covers_what_is_loaded(folder: Path, name: str):
    before = job_digest.digest(job_file.load(folder / "job.toml"))
    assert job_digest.digest(job_file.load(folder / "job.toml")) == before
    (folder / name).write_text((folder / name).read_text() + "# changed\n")
    assert job_digest.digest(job_file.load(folder / "job.toml")) != before


def test_a_folder_is_searched_for_all_files_that_a_job_names(folder: Path):
    """Before the job is submitted; a folder with other files is none that has them."""
    job = job_file.load(folder / "job.toml")
    document = job_file.document(job)
    code_files.check_present(document, folder)
    with pytest.raises(JobError, match=r"^model.factory: .*no file ./my_m"):
        code_files.check_present(document, folder / "deep")
    (folder / "layers.py").write_text("")
    with pytest.raises(
        JobError, match=r"differs from.*beside aggregator\.toml and each s"
    ):
        code_files.check_present(document, folder)
    nested = {"model": {"options": {"parts": [{"factory": job.model.factory}]}}}
    with pytest.raises(JobError, match=r"^model.options.parts\[0\].factory: "):
        code_files.check_present(nested, folder)


@pytest.mark.parametrize("table", ["optimizer", "learning_rate"])
def test_an_optimizer_and_a_schedule_are_pinned(folder: Path, table: str):
    """A site trains with that code only."""
    name = f'training.{table}.name="./my_model.py:net"'
    job = job_file.load(folder / "job.toml", [name])
    found = getattr(job.training, table).name
    assert re.fullmatch(rf"\./my_model\.py@{SHA}:net", found)


def test_the_same_code_elsewhere_has_the_same_name(folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    (other / "deep").mkdir(parents=True)
    for name in ("my_model.py", "layers.py", "deep/down.py"):
        (other / name).write_bytes((folder / name).read_bytes())
    assert pinned(other) == pinned(folder)


def test_a_pinned_name_stays_as_it_is(folder: Path):
    name = pinned(folder)
    (folder / "my_model.py").write_text(MODEL + "# changed\n")
    assert pinned(folder, name) == name
    with pytest.raises(JobError, match=r"my_model\.py has changed since") as caught:
        import_factory(name, key="model.factory")
    assert caught.value.key == "model.factory"
    # What leaves a deployed site does not say where the file is, or what is in it.
    said = "model.factory: ./my_model.py is not the file that the job names"
    assert caught.value.outside == said


def test_of_two_folders_that_with_the_digest_counts(folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "alone.py").write_text("def net(): return 'other'\n")
    name = pinned(folder, "./alone.py:net")
    code_files.look_in(other)
    assert import_factory(name)() is None
    assert import_factory("./alone.py:net")() == "other"


def test_changed_code_is_loaded_anew(folder: Path):
    (folder / "alone.py").write_text("def net(): return 1\n")
    assert import_factory(pinned(folder, "./alone.py:net"))() == 1
    (folder / "alone.py").write_text("def net(): return 2\n")
    assert import_factory(pinned(folder, "./alone.py:net"))() == 2


def test_nothing_runs_that_was_not_hashed(folder: Path):
    """A module that a file imports by other means is not found."""
    text = "from importlib import import_module\nimport_module('.layers', __package__)"
    (folder / "alone.py").write_text(f"{text}\ndef net(): ...\n")
    with pytest.raises(JobError, match=r"needs '\.layers', which is beside it"):
        import_factory(pinned(folder, "./alone.py:net"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("./none.py:net", r"there is no file ./none.py in .*: put it there, and to"),
        ("./broken.py:net", r"not Python: invalid syntax \(broken.py, line 2\)"),
    ],
)
def test_a_file_that_cannot_be_pinned_names_its_key(
    folder: Path, text: str, reason: str
):
    (folder / "broken.py").write_text("\ndef (\n")
    with pytest.raises(JobError, match=f"model.factory: .*{reason}"):
        pinned(folder, text)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (
            "import layers",
            "'layers', which is beside it:",
        ),
        ("import leyers", "needs 'leyers', which is not installed"),
        ("from .layers import none", "cannot be imported: ImportError: cannot import"),
        ("from .none import x", "needs '.none': there is no none.py beside it"),
        ("import deploy; deploy.mine()", "'deploy' is a package of"),
        (
            "import clients.mine",
            "'clients' is a package of",
        ),
    ],
)
def test_a_file_that_cannot_be_imported_says_why(folder: Path, first: str, reason: str):
    (folder / "alone.py").write_text(f"{first}\ndef net(): ...\n")
    with pytest.raises(JobError) as caught:
        import_factory(pinned(folder, "./alone.py:net"), key="model.factory")
    assert reason in str(caught.value)
    assert str(caught.value).count("is a package of crossfed") <= 1
    assert "crossfed_code" not in str(caught.value)


def test_a_file_inside_options_is_pinned(folder: Path):
    member = {"factory": "./my_model.py:net", "text": "./my_model.py"}
    document = {"model": {"options": {"members": [member]}}}
    code_files.pin(document, folder)
    assert re.fullmatch(rf"\./my_model\.py@{SHA}:net", member["factory"])
    assert member["text"] == "./my_model.py"


WORKS = ("./lab/mine.py:rings", "./lab/mine.py:focal")
TABLES = ("model", "data", "training", "training.optimizer", "training.learning_rate")


@pytest.mark.parametrize("table", [*TABLES, "sites.0.data"])
@pytest.mark.parametrize("shape", ["{}", "[[{}]]", "{{ deep = {{ name = {} }} }}"])
def test_a_file_under_any_key_of_options_is_pinned(
    folder: Path, table: str, shape: str
):
    """A site accepts no other: what it is asked about is what was pinned."""
    text = "./alone.py:net"
    override = f"{table}.options.prepare={shape.format(json.dumps(text))}"
    kind = {"sites.0.data": "source"}.get(table, "name")
    parent = [f'{table}.{kind}="./lab/mine.py:focal"'] if "." in table else []
    job = job_file.load(folder / "job.toml", [*parent, override])
    before = job_digest.digest(job)
    found = dict(code_files.texts(job_file.document(job)))
    keys = [key for key in found if ".options.prepare" in key]
    named = [code_files.unpinned(found[key]) for key in keys]
    assert text in named
    assert text not in found.values()
    policy = PolicySpec(
        privacy="none",
        secure_aggregation=False,
        functions=(text, "./my_model.py:net", *WORKS),
    )
    site_policy.check_job(job, policy, SiteId("b"))
    code_files.check_present(job_file.document(job), folder)
    (folder / "alone.py").write_text("def net(): return 1\n")
    job = job_file.load(folder / "job.toml", [*parent, override])
    assert job_digest.digest(job) != before


def test_keys_and_tuples_of_options_are_pinned(folder: Path):
    text = "./my_model.py:net"
    document = {"model": {"options": {"parts": (text, {text: 0.5})}}}
    code_files.pin(document, folder)
    name = pinned(folder)
    assert document == {"model": {"options": {"parts": (name, {name: 0.5})}}}


def test_a_site_loads_a_file_only_if_its_policy_names_it(folder: Path):
    name, text = pinned(folder), "./my_model.py:net"
    assert site_policy.is_accepted(name, (text,))
    assert site_policy.is_accepted(name, (name,))
    for function, accepted in (
        (name, ()),
        (name, ("clients.models:*", "my_model:*", "./my_model.py:*")),
        (name, (name.replace("@", "@0")[:14] + name[15:],)),
        (text, (text,)),  # Not pinned: nobody could tell which code it is.
        (name.replace("./", "/"), (text,)),
        (name.replace("./", "../"), (text,)),
        (name.replace(":net", ":head"), (text,)),
    ):
        assert not site_policy.is_accepted(function, accepted), (function, accepted)


def test_children_look_where_their_parent_does(folder: Path):
    code_files.look_in(folder)
    code_files.look_in(folder)
    assert os.environ[code_files.FOLDERS] == f"{folder}:/nowhere"
