"""Figures over a sweep: each with a table, and what the tables say."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from support import event_samples
from support.event_samples import Script

from deploy.cli import commands as cli
from federation.event_log import EventWriter
from federation.events import ModelEvaluated, SiteAnswered
from federation.messages import MetricSums
from monitoring.runs.run_folder import RunFolder, leave_sweep

pytestmark = pytest.mark.slow

# Of each run: learning rate, name, sites, epsilon and the last loss.
RUNS = [
    (0.1, "base", 2, None, 1.0),
    (0.2, "base", 2, None, 0.8),
    (0.4, "base", 2, None, 2.0),
    (0.1, "=cmd|x", 2, None, 1.5),
    (0.1, "base", 3, None, 0.9),
    (0.1, "base", 2, 4.0, 1.2),
    (0.1, "base", 2, 8.0, 1.1),
]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    for index, (rate, word, sites, epsilon, loss) in enumerate(RUNS):
        names = tuple(f"site-{at}" for at in range(sites))
        script = Script(sites=names, rounds=3, epsilon_cap=epsilon, public=True)
        run = RunFolder(folder / "trials" / f"{index:04d}")
        with EventWriter(run.events) as log:
            sums = MetricSums(count=4, loss_sum=4 * loss, metrics={})
            for event in event_samples.run(script):
                is_result = isinstance(event, ModelEvaluated)
                log(replace(event, pooled=sums) if is_result else event)
        tables = [f'[training]\nlr = {rate}\nword = "{word}"']
        tables += [f'[[sites]]\nname = "{name}"' for name in names]
        if epsilon:
            tables.append(f'[privacy]\nunit = "record"\ntarget_epsilon = {epsilon}')
        (run.path / "job.toml").write_text("\n".join(tables))
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def test_each_figure_has_its_data_beside_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["report", "--sweep", str(folder), "--out", str(tmp_path), "--json"]
    assert cli.main(command) == 0
    drawn = json.loads(capsys.readouterr().out)
    assert [Path(each).stem for each in drawn["figures"]] == [
        "communication-time",
        "utilisation",
        "sites-time",
        "sensitivity",
        "tornado",
        "cost-loss",
        "epsilon-loss",
    ]
    for each in map(Path, drawn["figures"]):
        ET.parse(each)  # noqa: S314 -- our own file
        assert table(each.with_suffix(".csv"))
    traffic = table(tmp_path / "communication-time.csv")
    view = RunFolder(folder / "trials" / "0000").view()
    rows = [row for row in traffic if row["run"].endswith("0000")]
    assert int(rows[-1]["bytes"]) == view.bytes_up + view.bytes_down
    assert len(table(tmp_path / "epsilon-loss.csv")) == 2
    # The sensitivity is of runs that differ from most others in one key.
    rows = table(tmp_path / "sensitivity.csv")
    found = {
        key: [(r["value"], float(r["held-out loss"])) for r in rows if r["key"] == key]
        for key in dict.fromkeys(row["key"] for row in rows)
    }
    assert found["training.lr"] == [("0.1", 1.0), ("0.2", 0.8), ("0.4", 2.0)]
    assert found["number of sites"] == [("2", 1.0), ("3", 0.9)]
    # A spreadsheet takes no value for a formula.
    assert found["training.word"] == [("base", 1.0), ("'=cmd|x", 1.5)]
    assert "privacy.unit" not in found, "it changes only with the target"
    assert {row["baseline"][-4:] for row in rows} == {"0000"}
    methods = {row["key"]: row["method"] for row in rows}
    assert methods["training.lr"] == "one at a time"


def test_no_site_s_own_times_where_only_sums_may_be_known(tmp_path: Path):
    """A private run and a secure one have no row; nor a series without values."""
    scripts = {
        "clear": Script(rounds=3),
        "private": Script(rounds=3, epsilon_cap=8.0),
        "secure": Script(rounds=3, secure=True),
    }
    for name, script in scripts.items():
        run = RunFolder(tmp_path / "runs" / f"20260101-{name}")
        with EventWriter(run.events) as log:
            for event in event_samples.run(replace(script, job_name="one")):
                is_answer = isinstance(event, SiteAnswered)
                log(replace(event, resources=None) if is_answer else event)
        sites = '[[sites]]\nname = "a"\n[[sites]]\nname = "{0}"\n'
        (run.path / "job.toml").write_text(f'name = "{name}"\n{sites.format(name)}')
    runs = [RunFolder(path) for path in sorted((tmp_path / "runs").iterdir())]
    drawn = {path.stem: path for path in leave_sweep(runs, tmp_path / "out")}
    rows = table(drawn["utilisation"].with_suffix(".csv"))
    assert {row["run"] for row in rows} == {"one 20260101-clear"}
    assert "at work" not in drawn["utilisation"].read_text()
    (row,) = table(drawn["epsilon-loss"].with_suffix(".csv"))
    assert float(row["standard deviation of its noise"]) > 0
    legend = drawn["communication-time"].read_text()
    for name in (
        "1 one 20260101-clear",
        "2 ...0260101-private",
        "3 ...20260101-secure",
    ):
        assert f">{name}<" in legend, name
    # Names of job and sites change no loss.
    assert not {"sensitivity", "tornado"} & set(drawn)
    leave_sweep(runs[1:], tmp_path / "none")
    assert not (tmp_path / "none" / "utilisation.csv").exists()


def test_one_run_is_no_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["report", "--sweep", str(tmp_path)]) == 2
    assert "at least two runs" in capsys.readouterr().err
