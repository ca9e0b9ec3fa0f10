"""Pooled data, each site alone and the federation, side by side."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from support.small_jobs import blobs, small_job

from deploy.cli import commands as cli
from deploy.tools.baselines import FEDERATION, POOLED, baselines
from federation.clock import SystemClock
from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec
from monitoring.views.baselines import ALL, Baseline, Baselines

pytestmark = pytest.mark.slow


def found(job: JobSpec, seeds: int = 1) -> tuple[Baselines, dict[str, Baseline]]:
    done = baselines(
        job, seeds=range(seeds), clock=SystemClock(), say=lambda _line: None
    )
    return done, {row.name: row for row in done.rows}


def job_of(num_sites: int, **tables: Any) -> JobSpec:
    training = {"local_steps": 3, "batch_size": 60, "optimizer": {"lr": 0.5}}
    return small_job(
        num_sites=num_sites, **{"rounds": 2, "training": training} | tables
    )


def test_a_federation_of_one_site_is_its_own_baseline():
    """With all records in a batch, whose order then decides nothing."""
    _, rows = found(job_of(1))
    losses = [row.values("loss", ALL)[0] for row in rows.values()]
    assert len(losses) == 3
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_work_is_equal_and_every_model_is_at_every_site():
    """Each record is seen as often; rows of single sites are the cross-site matrix."""
    done, rows = found(job_of(3), seeds=2)
    steps = {name: row.steps for name, row in rows.items()}
    assert steps == {
        FEDERATION: 6,
        POOLED: 18,
        "only site-0": 6,
        "only site-1": 6,
        "only site-2": 6,
    }
    for row in rows.values():
        for one in row.trainings:
            assert one.results.keys() == {ALL, "site-0", "site-1", "site-2"}
            counts = [one.results[f"site-{i}"].count for i in range(3)]
            assert sum(counts) == one.results[ALL].count == len(blobs()[1].targets)
    document = done.document()
    first = document["rows"][0]["loss"][ALL]
    assert first["mean"] == pytest.approx(np.mean(first["values"]))
    assert first["std"] == pytest.approx(np.std(first["values"], ddof=1))
    assert len(set(first["values"])) == 2  # Seeds differ.
    heads, cells = done.table("accuracy")
    assert heads[:2] == ["accuracy", ALL]
    assert all("+-" in row[1] for row in cells)


def test_every_row_of_a_private_job_keeps_the_same_promise():
    """Noise of whole sites has no meaning at one, which the notes say."""
    table = {"target_epsilon": 8.0, "clip_norm": 1.0, "delta": 1e-3}
    table["noise_multiplier"] = 2.0  # Found at once.
    training = {"local_steps": 1, "batch_size": 4, "optimizer": {"lr": 0.5}}
    _, rows = found(
        job_of(
            1,
            rounds=1,
            training=training,
            aggregation={"weights": "uniform"},
            privacy={"differential_privacy": {"unit": "record", **table}},
        )
    )
    for row in rows.values():
        assert 0 < row.trainings[0].epsilon <= 8.0


def test_what_has_no_baselines_is_refused():
    with pytest.raises(JobError, match=r"for simulations.*run --evaluate") as caught:
        found(dataclasses.replace(job_of(2), data=None))
    assert caught.value.key == "data"
    with pytest.raises(JobError) as caught:
        found(dataclasses.replace(job_of(2), rounds=0))
    assert caught.value.key == "rounds"


def test_each_sites_personal_model_is_at_each_other_site():
    """The federation's result at a site is that of the site's own model."""
    training = {"local_steps": 5, "batch_size": 10, "optimizer": {"lr": 0.5}}
    job = job_of(2, training=training, model={**MODEL, "personal": ["*bias"]})
    _, rows = found(job)
    own = {site: rows[f"federation at {site}"] for site in ("site-0", "site-1")}
    shared = rows[FEDERATION].trainings[0].results
    for site, row in own.items():
        assert row.trainings[0].results[site] == shared[site]
    others = [row.trainings[0].results["site-0"].loss_sum for row in own.values()]
    assert others[0] != others[1]
    assert shared[ALL] == shared["site-0"] + shared["site-1"]


MODEL = {
    "factory": "clients.models:logistic_regression",
    "options": {"inputs": 4, "classes": 3},
}


def test_the_command_writes_a_page_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job = tmp_path / "job.toml"
    job.write_text(tomli_w.dumps(job_file.document(job_of(2))))
    words = ["baselines", str(job), "--out", str(tmp_path / "out"), "--json"]
    assert cli.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert Path(document.pop("page")).read_text().count("only site-1") == 2
    assert document == json.loads((tmp_path / "out/baselines.json").read_text())
    assert cli.main([*words, "--set", "seed=2"]) == 2
    assert "earlier call" in capsys.readouterr().err


def test_tables_are_standardised_in_every_row(tmp_path: Path):
    """Pooled data take the columns of the moments, as each site's records do."""
    drawn, sites = np.random.default_rng(0), []
    for name in ("a", "b"):
        columns = {"label": np.arange(40) % 2, "age": drawn.normal(50, 9, 40)}
        np.savez(tmp_path / f"{name}.npz", ward=drawn.integers(0, 9, 40), **columns)
        options = {"path": str(tmp_path / f"{name}.npz"), "target": "label"}
        options["held_out_fraction"] = 0.25
        source = {"source": "clients.data:table", "options": options}
        sites.append({"name": name, "data": source})
    training = {"local_steps": 1, "standardise": "stats:survey"}
    document = {
        "name": "t",
        "rounds": 1,
        "model": {**MODEL, "options": {"inputs": 1, "classes": 2}},
        "training": {**training, "moments": {"age": [50.0, 9.0]}},
        "sites": sites,
    }
    _, rows = found(job_file.parse(document))
    for row in rows.values():
        assert row.trainings[0].results[ALL].count == 20
