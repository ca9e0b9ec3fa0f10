"""Runs of statistics: equal to what NumPy finds in all records together."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tomli_w
import torch
from pyarrow import csv, parquet
from scipy.spatial.distance import jensenshannon
from support.secure_runs import run as secure_run, silence
from support.without_report import simulate

import crossfed
from deploy.cli.commands import main
from deploy.cli.simulate_verb import print_statistics
from deploy.wiring import parts as wiring
from federation.errors import JobError, RunNotFound, SiteError
from federation.ids import SiteId
from federation.job import job_digest, job_file
from federation.job.spec import JobSpec
from monitoring.pages.report import render
from monitoring.runs.run_folder import RunFolder
from monitoring.views.statistics_view import RunStatistics

SITES, ROWS = ("north", "south", "west"), 300
SEXES = ("f", "m")
AGE = {"names": ["age"], "low": 0.0, "high": 110.0, "bins": 11}
LAB = {"names": ["sodium", "crp"], "low": -50.0, "high": 250.0, "quantiles": [0.1, 0.5]}
SEX = {"names": ["sex"], "categories": ["f", "m"]}
NOISE = {
    "differential_privacy": {"unit": "record", "target_epsilon": 8.0, "delta": 1e-4}
}
SECURE = {"secure_aggregation": {"enabled": True}}


def drawn(seed: int, size: int = ROWS) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    crp = rng.exponential(20, size)
    crp[rng.random(size) < 0.1] = np.nan
    return {
        "age": rng.integers(0, 100, size).astype(float),
        "sodium": rng.normal(140, 4, size),
        "crp": crp,
        "sex": rng.choice(["f", "m", "x"], size, p=[0.5, 0.45, 0.05]),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of a site's records in each format."""
    found = tmp_path_factory.mktemp("tables")
    north, south, west = map(drawn, range(3))
    nulls = {k: pa.array(v, from_pandas=True) for k, v in north.items()}
    parquet.write_table(pa.table(nulls), found / "north.parquet")
    csv.write_csv(
        pa.table({k: pa.array(v, from_pandas=True) for k, v in south.items()}),
        found / "south.csv",
    )
    np.savez(found / "west.npz", **west)
    return found


FILES = {"north": "north.parquet", "south": "south.csv", "west": "west.npz"}


def job(folder: Path, **tables: Any) -> JobSpec:
    sites = [
        {
            "name": name,
            "data": {
                "source": "clients.data:table",
                "options": {"path": str(folder / FILES[name])},
            },
        }
        for name in SITES
    ]
    asked = {"covariances": True, "columns": [AGE, LAB, SEX]}
    return job_file.parse(
        {"name": "survey", "statistics": asked, "sites": sites, **tables}
    )


@pytest.mark.parametrize("privacy", [{}, SECURE], ids=["clear", "secure"])
def test_sums_are_those_of_all_records_together(folder: Path, privacy: dict[str, Any]):
    run = simulate(job(folder, privacy=privacy))
    found = run.statistics
    assert found is not None
    parts = [drawn(seed) for seed in range(3)]
    pooled = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    assert (found.sites, found.records) == (3, 3 * ROWS)
    by_name = {column.name: column for column in found.columns}
    for name in ("age", "sodium", "crp"):
        values, column = pooled[name], by_name[name]
        low, high = (0.0, 110.0) if name == "age" else (-50.0, 250.0)
        close = {"rel": 1e-9, "abs": (high - low) * 1e-9}
        known = values[~np.isnan(values)]
        assert column.count == known.size
        assert column.missing == values.size - known.size
        assert column.mean == pytest.approx(known.mean(), **close)
        assert column.variance == pytest.approx(known.var(ddof=1), **close)
        assert (column.below, column.above) == (0, 0)
        for quantile, value in column.quantiles.items():
            exact = np.quantile(known, float(quantile), method="inverted_cdf")
            assert value == pytest.approx(exact, abs=(high - low) / 32768)
    counts = np.histogram(pooled["age"], np.linspace(0, 110, 12))[0]
    assert by_name["age"].histogram == tuple(counts)
    sexes = dict(zip(*np.unique(pooled["sex"], return_counts=True), strict=True))
    assert by_name["sex"].categories == {"f": sexes["f"], "m": sexes["m"]}
    assert by_name["sex"].other == sexes["x"]
    table = np.array([pooled[name] for name in found.numbers])
    whole = table[:, ~np.isnan(table).any(axis=0)]
    assert found.complete == whole.shape[1]
    np.testing.assert_allclose(found.covariances, np.cov(whole), rtol=1e-7, atol=1e-5)
    np.testing.assert_allclose(found.correlations, np.corrcoef(whole), atol=1e-7)
    assert run.rounds_completed == 2
    assert run.epsilon is None


def test_noised_sums_are_charged_once_for_each_round(folder: Path, tmp_path: Path):
    private = {
        "differential_privacy": {"unit": "record", "target_epsilon": 2.0, "delta": 1e-4}
    }
    spec = job(folder, privacy=SECURE | private, simulation={"total_epsilon": 2.5})
    run = simulate(spec, folder=tmp_path / "a" / "first")
    found = run.statistics
    assert found is not None
    assert found.epsilon == pytest.approx(2.0, rel=1e-3)
    assert found.epsilon <= 2.0
    assert found.noise["counts"] > 1
    assert found.records != 3 * ROWS or found.columns[0].count != 3 * ROWS
    assert abs(found.records - 3 * ROWS) < 6 * found.noise["counts"]
    for column, mean in (("age", 49.5), ("sodium", 140.0)):
        row = next(r for r in found.columns if r.name == column)
        assert row.mean is not None
        assert abs(row.mean - mean) < 6 * row.noise["mean"] + 5
    with pytest.raises(Exception, match="total_epsilon"):
        simulate(spec, folder=tmp_path / "a" / "second")


def test_a_run_that_is_stopped_resumes_and_gives_the_same(folder: Path, tmp_path: Path):
    whole = simulate(job(folder, privacy=SECURE))
    asked = iter([False, True])
    stopped = simulate(
        job(folder, privacy=SECURE),
        folder=tmp_path / "run",
        stop_requested=lambda: next(asked, True),
    )
    assert stopped.rounds_completed == 1
    assert stopped.statistics is None
    resumed = simulate(
        job(folder, privacy=SECURE), folder=tmp_path / "run", resume=True
    )
    assert resumed.statistics == whole.statistics


def test_a_lost_round_is_asked_again(folder: Path):
    faults = [{"site": "west", "kind": "silent", "rounds": [1]}]
    run, whole = (
        simulate(job(folder, simulation={"faults": faults})),
        simulate(job(folder)),
    )
    assert run.statistics == whole.statistics
    # Rounds that are held in reserve are not rounds to come.
    assert (whole.view.started.rounds, whole.view.num_rounds) == (2, 2)
    assert (run.view.started.rounds, run.view.num_rounds) == (3, 3)
    away = [{"site": "west", "kind": "crash"}]
    few = simulate(
        job(folder, schedule={"minimum_sites": 2}, simulation={"faults": away})
    ).statistics
    assert few is not None
    assert (few.sites, few.records) == (2, 2 * ROWS)


def test_sums_through_a_relay_and_without_a_dropped_site_are_exact():
    """Each with masks: the mean is taken times the sites that are in it.

    Only what compares single sites is known in the clear alone.
    """
    names = [f"site-{at}" for at in range(5)]
    column = {"names": ["0"], "low": -5.0, "high": 5.0, "bins": 4}
    document = {
        "name": "s",
        "data": {"source": "clients.data:breast_cancer"},
        "statistics": {"columns": [column]},
        "sites": [{"name": name} for name in names],
    }
    whole = simulate(job_file.parse(document)).statistics
    assert whole is not None
    assert whole.drift
    few = {"secure_aggregation": {"enabled": True, "threshold": 4}}
    relays = [{"name": "relay", "sites": names[:1]}]
    relayed = job_file.parse({**document, "privacy": few, "relays": relays})
    assert simulate(relayed).statistics == replace(whole, drift=())
    faults = {"faults": [{"site": names[4], "kind": "crash"}]}
    dropped = {**document, "simulation": faults}
    clear = simulate(job_file.parse({**dropped, "schedule": {"minimum_sites": 4}}))
    masked = simulate(job_file.parse({**dropped, "privacy": few}))
    assert clear.statistics is not None
    assert clear.statistics.sites == 4
    assert masked.statistics == replace(clear.statistics, drift=())


def test_sums_are_found_without_a_site_that_is_silent_in_the_setup():
    """The spare rounds are enough for that."""
    few = {"secure_aggregation": {"enabled": True, "threshold": 4}}
    document = {
        "name": "s",
        "data": {"source": "clients.data:breast_cancer"},
        "privacy": few,
        "statistics": {"columns": [{"names": ["0"], "low": -5.0, "high": 5.0}]},
        "sites": [{"name": f"site-{at}"} for at in range(5)],
    }
    fault = silence("advertise", ["site-4"], times=9)
    done = secure_run(job_file.parse(document), fault=fault)
    assert done.statuses() == ["lost", "lost", "completed"]
    assert len(done.answered(3)) == 4


def test_a_simulation_warns_of_sums_that_sites_would_refuse(tmp_path: Path):
    """Subtract one from the other, and it is the one site's."""
    noise = {"differential_privacy": {"unit": "record", "target_epsilon": 1.0}}

    def warned(sites: int, name: str, **privacy: Any) -> list[str]:
        column = {"names": ["0"], "low": -5.0, "high": 5.0}
        document = {
            "name": name,
            "data": {"source": "clients.data:breast_cancer"},
            "statistics": {"columns": [column]},
            "sites": [{"name": f"site-{at}"} for at in range(sites)],
            "privacy": SECURE | privacy,
        }
        folder = tmp_path / name / f"run-{sites}-{len(privacy)}"
        run = simulate(job_file.parse(document), folder=folder)
        return [each.message for each in run.view.warnings]

    assert not any("differ by" in text for text in warned(4, "a"))
    assert not any("differ by" in text for text in warned(3, "b", **noise))
    (text,) = [text for text in warned(3, "b") if "differ by" in text]
    assert "differ by site-3: " in text
    assert "policy.min_group" in text
    assert not any("differ by" in text for text in warned(4, "a", **noise))


def test_a_simulation_warns_of_what_deployed_sites_leave_out_or_refuse(folder: Path):
    """Not of noised sums, which they answer as a simulation does."""

    def warned(**tables: Any) -> list[str]:
        found = [w.message for w in simulate(job(folder, **tables)).view.warnings]
        return [text for text in found if "min_count" in text]

    (text,) = warned(privacy=SECURE)
    assert "refuse" not in text
    overlap = {"columns": [{**AGE, "quantiles": [0.5]}]}
    (text,) = warned(privacy=SECURE, statistics=overlap)
    assert "refuse this job: statistics.columns[0]: " in text
    assert "would overlap" in text
    (text,) = warned(statistics={"columns": [AGE]})
    assert "policy.secure_aggregation" in text
    assert text.isprintable()  # In one line, though a policy refuses with several.
    assert not warned(privacy=SECURE | NOISE, statistics=overlap)


def test_the_verb_prints_and_keeps_what_a_run_found(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    spec = job(folder)
    Path("survey.json").write_text("")
    Path("job.toml").write_text(tomli_w.dumps(job_file.document(spec)))
    assert main(["stats", "job.toml", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert "  2 rounds  3 sites\n" in err
    assert "loss" not in err
    assert "evaluated" not in err
    assert document["statistics"]["records"] == 3 * ROWS
    page = (Path(document["folder"]) / "report.html").read_text()
    view = RunFolder(Path(document["folder"])).view()
    assert view.predicted is not None
    low, high = view.predicted.bytes_up
    assert low <= view.bytes_up <= high < 1.1 * view.bytes_up
    assert main(["stats", "survey"]) == 0
    shown = capsys.readouterr().out
    assert "age" in shown
    assert "sex = m" in shown
    assert "age: 11 bins from 0 to 110: " in shown
    assert "correlations over" in shown
    assert "±" not in shown
    for word in ("Held-out", "Training loss", "Update size", "<b>model", "changed"):
        assert word not in page, word
    assert "sodium" in page
    assert page.count("(other)") >= 2  # In the table, and beside a bar.
    assert "figure-column-0" in page
    assert "figure-correlations" in page
    exact = RunStatistics.parse(document["statistics"])
    columns = (replace(exact.columns[0], hidden=7), *exact.columns[1:])
    few = replace(exact, columns=columns, rank_error=18, sites_left_out=1)
    print_statistics(few)
    shown_few = capsys.readouterr().out
    for text, without in (
        (shown_few, shown),
        (render(view, "", {}, statistics=few), page),
    ):
        for words in ("(7 of age)", "1 of the sites", "( to )"):
            assert words in text, words
            assert words not in without, words
    Path("plain.toml").write_text('name = "x"\n')
    assert main(["stats", "plain.toml"]) == 2
    assert main(["stats", "nothing"]) == 2


def test_a_job_of_statistics_can_be_checked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its columns are read, and no step is taken."""
    path = tmp_path / "job.toml"
    noise = {"differential_privacy": {"unit": "record", "target_epsilon": 1.0}}
    for privacy in (None, SECURE, SECURE | noise):
        spec = job(folder) if privacy is None else job(folder, privacy=privacy)
        path.write_text(tomli_w.dumps(job_file.document(spec)))
        assert main(["check-job", str(path)]) == 0
        out = capsys.readouterr().out
        assert ": 2 rounds, 3 sites, " in out
        assert "the job is sound" in out
        exact = privacy is None or "differential_privacy" not in privacy
        assert ("min_count" in out) == exact
    assert main(["check-job", str(path), "--set", 'statistics.columns.0.names=["x"]'])
    assert "site 'south' has no column 'x'" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["joint", "site"])
def test_noise_of_another_unit_is_refused_for_one_reason(unit: str):
    document = {
        "name": "s",
        "statistics": {"columns": [AGE]},
        "sites": [{"name": name} for name in SITES],
        "privacy": SECURE
        | {"differential_privacy": {"unit": unit, "target_epsilon": 1.0}},
    }
    with pytest.raises(JobError) as caught:
        job_file.parse(document)
    assert "element_bound" not in str(caught.value)
    assert 'unit = "record"' in str(caught.value)


def test_a_run_of_statistics_standardises_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Columns in one order, with a mean of 0 and a deviation of 1; gaps are 0."""
    monkeypatch.chdir(tmp_path)
    found = simulate(job(folder), folder=Path("runs/survey/first")).statistics
    assert found is not None
    codes = {"target": "sex", "categories": {"sex": ["f", "m", "x"]}}
    sites = job_file.document(job(folder))["sites"]
    for site in sites:
        site["data"]["options"] |= codes
    weights = [*found.class_weights("sex"), 9.0]
    document = {
        "name": "t",
        "rounds": 1,
        "model": {
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": 3, "classes": 3},
        },
        "training": {
            "local_steps": 1,
            "standardise": "stats:survey",
            "options": {"class_weights": weights},
        },
        "evaluation": {"every": 0},
        "sites": sites,
    }
    training = crossfed.load_job(document)
    assert sorted(training.training.moments) == ["age", "crp", "sodium"]
    data = wiring.build_federation(training).site_data
    rows = [each.batch(np.arange(len(each))) for each, _ in data.values()]
    inputs = torch.cat([row[0] for row in rows])
    np.testing.assert_allclose(inputs.mean(0), 0, atol=0.05)
    np.testing.assert_allclose(inputs.std(0), 1, atol=0.06)
    gaps = np.isnan(drawn(0)["crp"]).sum()
    assert int((rows[SITES.index("north")][0][:, 1] == 0).sum()) == gaps
    labels = data[SiteId("north")][0].labels()
    assert labels is not None
    words = np.array(["f", "m", "x"])[labels]
    assert words.tolist() == drawn(0)["sex"].tolist()
    assert simulate(training).status == "completed"
    moments = {**training.training.moments, "age": (0.0, 1.0)}
    other = replace(training, training=replace(training.training, moments=moments))
    assert job_digest.digest(training) != job_digest.digest(other)
    with pytest.raises(RunNotFound):
        crossfed.load_job(document, {"training.standardise": "stats:none"})
    some = crossfed.load_job(
        document,
        {
            "training.standardise": f"stats:{tmp_path}/runs/survey",
            "training.inputs": ["crp", "age"],
        },
    )
    assert [*some.training.moments] == ["crp", "age"]
    with pytest.raises(JobError, match=r"inputs.*height"):
        crossfed.load_job(document, {"training.inputs": ["height"]})
    private = {"unit": "record", "target_epsilon": 4.0}
    with pytest.raises(JobError, match=r"training.standardise: .*exact"):
        crossfed.load_job(
            {**document, "aggregation": {"weights": "uniform"}},
            {"privacy.differential_privacy": private},
        )


@pytest.mark.parametrize(
    ("privacy", "said"), [({}, "constant"), (NOISE, "target_epsilon")]
)
def test_columns_without_a_deviation_are_named_with_those_that_have_one(
    tmp_path: Path, privacy: dict[str, Any], said: str
):
    found = simulate(
        apart_job(tmp_path, privacy=privacy), folder=tmp_path / "found"
    ).statistics
    assert found is not None
    document = {
        "name": "t",
        "rounds": 1,
        "model": {"factory": "clients.models:logistic_regression"},
        "training": {"local_steps": 1, "standardise": f"stats:{tmp_path}/found"},
        "sites": [{"name": "north"}],
    }
    with pytest.raises(
        JobError, match=rf'same; .*{said}.*inputs = \["height", "age"\]'
    ):
        crossfed.load_job(document)
    rest = {"training.inputs": ["age"]}
    training = crossfed.load_job(document, rest).training
    assert training.moments.keys() == {"age"}
    limits = () if found.epsilon is None else (found.epsilon, found.delta)
    assert training.moments_privacy == limits


def test_a_site_that_lacks_a_column_is_named(folder: Path):
    columns = [{**AGE, "names": ["age", "height"]}]
    with pytest.raises(SiteError, match=r"(?s)north.*height.*west.*height"):
        simulate(job(folder, statistics={"columns": columns}))


def apart_job(folder: Path, **tables: Any) -> JobSpec:
    """The last site has older records, and more of one category."""
    rng = np.random.default_rng(5)
    for name in SITES:
        far = name == SITES[-1]
        np.savez(
            folder / f"{name}.npz",
            age=rng.normal(60.0 if far else 50.0, 10.0, ROWS),
            height=rng.normal(170.0, 9.0, ROWS),
            sex=rng.choice(["f", "m"], ROWS, p=[0.9, 0.1] if far else [0.5, 0.5]),
            same=np.ones(ROWS),
        )
    columns = [
        {"names": ["height"], "low": 100.0, "high": 230.0},
        {"names": ["same"], "low": 0.0, "high": 2.0},
        SEX,
        AGE,
    ]
    sites = [
        {
            "name": name,
            "data": {
                "source": "clients.data:table",
                "options": {"path": str(folder / f"{name}.npz")},
            },
        }
        for name in SITES
    ]
    return job_file.parse(
        {"name": "a", "statistics": {"columns": columns}, "sites": sites, **tables}
    )


def test_sites_are_compared_where_each_ones_sums_are_in_the_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With SciPy as the oracle; the farthest column comes first."""
    run = simulate(apart_job(tmp_path), folder=tmp_path / "runs" / "a" / "first")
    assert run.statistics is not None
    drift = {row.column: row for row in run.statistics.drift}
    assert [row.column for row in run.statistics.drift][-1] == "same"
    data = [np.load(tmp_path / f"{name}.npz") for name in SITES]
    first, rest = data[-1]["age"], np.concatenate([d["age"] for d in data[:-1]])
    spread = math.sqrt((first.var(ddof=1) + rest.var(ddof=1)) / 2)
    assert drift["age"].site == drift["sex"].site == SITES[-1]
    assert drift["age"].difference == pytest.approx(
        (first.mean() - rest.mean()) / spread, rel=1e-6
    )
    edges = np.linspace(0, 110, 12)
    shares = [np.histogram(each, edges)[0] for each in (first, rest)]
    assert drift["age"].distance == pytest.approx(jensenshannon(*shares, base=2))
    assert drift["sex"].difference is None
    assert drift["height"].distance is None
    assert (drift["same"].difference, drift["same"].distance) == (None, None)
    assert main(["stats", str(tmp_path / "runs" / "a" / "first")]) == 0
    assert "drift " in capsys.readouterr().out
    resumed = RunFolder(tmp_path / "runs" / "a" / "first").read_statistics()
    assert resumed is not None
    assert resumed.drift == run.statistics.drift


@pytest.mark.parametrize(
    "privacy",
    [
        SECURE,
        {"differential_privacy": {"unit": "record", "target_epsilon": 9.0}},
    ],
)
def test_nothing_of_a_single_site_is_kept_elsewhere(
    tmp_path: Path, privacy: dict[str, Any]
):
    run = simulate(apart_job(tmp_path, privacy=privacy), folder=tmp_path / "run")
    assert run.statistics is not None
    assert run.statistics.drift == ()
    assert "SiteSummed" not in (tmp_path / "run" / "events.jsonl").read_text()
