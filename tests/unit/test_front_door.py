"""``import crossfed``: what it offers, and how it gets on with a user's own modules."""

import ast
import doctest
import functools
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_jobs import regression_job, small_job

import crossfed
from federation import OURS
from federation.errors import JobError, RunNotFound
from federation.job import job_file
from federation.job.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
JOB = small_job(num_sites=2, rounds=4)
ROWS = {"round", "loss", "accuracy", "training_loss", "epsilon", "bytes_up", "seconds"}


def python(code: str, folder: Path, *options: str) -> str:
    """Standard output of code that runs in a folder of a user."""
    file = folder / "users_script.py"
    file.write_text(code)
    done = subprocess.run(
        [sys.executable, *options, file],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_it_offers():
    assert set(dir(crossfed)) == set(crossfed.__all__)
    assert all(getattr(crossfed, name) is not None for name in crossfed.__all__)
    assert crossfed.__version__ == metadata.version("crossfed")
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        crossfed.simulat  # noqa: B018


def test_importing_it_imports_nothing_heavy(tmp_path: Path):
    code = "import sys, crossfed; print([*sys.modules])"
    loaded = set(ast.literal_eval(python(code, tmp_path)))
    assert "crossfed" in loaded
    rooms = {name.partition(".")[0] for name in loaded}
    others = {*OURS, "torch", "numpy", "matplotlib", "argparse"}
    assert rooms & others == {"federation"}  # The list of them is in it.
    assert "federation.errors" not in loaded


@pytest.mark.slow
def test_examples_in_docstrings_hold():
    assert doctest.testmod(crossfed) == doctest.TestResults(0, 5)


@pytest.mark.parametrize("form", ["path", "text", "dict", "job"])
def test_a_job_comes_from(form: str, tmp_path: Path):
    document = job_file.document(JOB)
    text = (ROOT / "jobs" / "quickstart.toml").read_text()
    file = tmp_path / "job.toml"
    file.write_text(text)
    sources: dict[str, Any] = {"path": str(file), "text": text}
    source = sources.get(form, document if form == "dict" else JOB)
    job = crossfed.load_job(source, {"training.optimizer.lr": 0.25}, rounds=2)
    assert (job.rounds, job.training.optimizer.lr) == (2, 0.25)
    assert JOB.rounds == document["rounds"] != 2  # What was given stays as it was.


class Net(torch.nn.Linear):
    """A model of this module's own."""


def test_a_function_or_class_stands_for_its_name():
    """In a dictionary, an override, or a job that Python has made."""
    document = job_file.document(JOB)
    options = {"in_features": 4, "out_features": 3}
    document["model"] = {"factory": Net, "options": options}
    expected = f"{__name__}:Net"
    assert crossfed.load_job(document).model.factory == expected
    changed = {"model.factory": Net, "model.options": options}
    assert crossfed.load_job(JOB, changed).model.factory == expected
    spec = replace(JOB, model=ModelSpec(factory=Net, options=options))  # type: ignore[arg-type]
    result = crossfed.simulate(spec, rounds=1)
    assert set(result.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("kind", ["closure", "lambda", "instance", "partial"])
def test_what_no_run_could_find_by_its_name_is_refused(kind: str):
    def closure() -> Net:
        return Net(4, 3)

    factory = {
        "closure": closure,
        "lambda": lambda: Net(4, 3),
        "instance": Net(4, 3),
        "partial": functools.partial(Net, 4, 3),
    }[kind]
    with pytest.raises(JobError, match=r"^model.factory: .*top of a module"):
        crossfed.load_job(JOB, {"model.factory": factory})


@pytest.mark.slow
def test_a_script_gives_its_own_functions(tmp_path: Path):
    """They are in ``__main__``, which a run here finds, too."""
    code = f"""
import crossfed, numpy, torch

class Net(torch.nn.Linear):
    pass

def records():
    inputs = numpy.eye(8, 4, dtype="float32")
    return (inputs, inputs.argmax(1)), (inputs, inputs.argmax(1))

job = {job_file.document(JOB)!r}
job["model"] = {{"factory": Net, "options": {{"in_features": 4, "out_features": 4}}}}
job["data"]["source"] = records
job["data"].pop("options", None)
print(crossfed.simulate(job).status)
"""
    assert python(code, tmp_path) == "completed\n"


def test_history_has_a_row_for_each_round():
    result = crossfed.simulate(JOB, rounds=3)
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert result.history[0].keys() >= ROWS
    assert not any(isinstance(value, dict) for value in result.history[0].values())
    assert result.history[-1]["loss"] == result.loss
    assert all(isinstance(t, torch.Tensor) for t in result.state_dict().values())


def test_accuracy_of_an_own_objective_is_in_the_history():
    bounds = {"loss": [0.0, 4.0], "accuracy": [0.0, 1.0]}
    job = regression_job("accuracy_within", metrics=bounds, num_sites=2)
    result = crossfed.simulate(job, rounds=1)
    assert 0 < result.accuracy == result.metrics["accuracy"]
    assert [row["accuracy"] for row in result.history] == [result.accuracy]


@pytest.mark.slow
def test_a_notebook_shows_a_result(tmp_path: Path):
    result = crossfed.simulate(JOB, rounds=2)
    shown = result._repr_html_()
    assert shown.startswith("<pre>")
    assert "completed" in shown
    assert result.plot().svg in shown
    result.plot("bytes").save(tmp_path / "bytes.svg")
    assert (tmp_path / "bytes.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match="no figure 'epsilon'"):
        result.plot("epsilon")


def test_callbacks_that_raise_do_not_end_a_run(caplog: pytest.LogCaptureFixture):
    rows = []

    def on_round(row: dict[str, Any]) -> None:
        rows.append(row)
        raise ValueError("my mistake")

    def on_event(_event: object) -> None:
        raise KeyError("another")

    result = crossfed.simulate(JOB, rounds=2, on_round=on_round, on_event=on_event)
    assert result.status == "completed"
    assert rows == result.history
    line = on_round.__code__.co_firstlineno + 2
    said = f"on_round raised ValueError: my mistake (test_front_door.py, line {line})"
    assert said in caplog.text
    assert "on_event raised KeyError" in caplog.text


@pytest.mark.slow
def test_runs_that_were_kept_have_pages(tmp_path: Path):
    one = crossfed.simulate(JOB, rounds=1, folder=tmp_path / "one")
    crossfed.simulate(JOB, rounds=2, folder=tmp_path / "two")
    page = crossfed.compare(one, tmp_path / "two", path=tmp_path / "both.html")
    assert page.read_text().count(JOB.name) > 1
    assert crossfed.report(one, tmp_path / "page.html").is_file()
    with pytest.raises(RunNotFound, match="give simulate a folder"):
        crossfed.report(crossfed.simulate(JOB, rounds=1))
    with pytest.raises(ValueError, match="two runs or more"):
        crossfed.compare(one)


def test_our_names_are_those_of_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*OURS, "crossfed"} == set(packages)


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A folder whose modules have names of ours."""
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "__init__.py").write_text("MINE = 1\n")
    (tmp_path / "clients" / "patients.py").write_text("")
    (tmp_path / "deploy.py").write_text("def go(): return 'mine'\n")
    return tmp_path


@pytest.mark.long
@pytest.mark.slow
def test_the_command_runs_beside_a_users_modules(users_folder: Path):
    done = subprocess.run(
        [sys.executable, "-m", "crossfed", "runs"],
        cwd=users_folder,
        env={"PYTHONPATH": str(users_folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        0,
        "crossfed: there are no runs in runs\n",
    )


def test_processes_of_ours_run_beside_a_users_modules(users_folder: Path):
    """As ranks and coordinators start, with PYTHONPATH as the operator has set it."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "crossfed.child", "deploy.site_host.config", "a"],
        env={"PYTHONPATH": str(users_folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
