"""A whole run that protects persons: what it promises, charges and says."""

from pathlib import Path
from typing import Any

import pytest
from support.small_jobs import small_job

from deploy.tools.export import examine
from deploy.wiring.simulation import simulate
from federation.errors import JobError
from monitoring.pages.model_card import model_card
from monitoring.runs.run_folder import RunFolder
from privacy.dp.ledger.ledger_files import read_file

pytestmark = pytest.mark.slow

SITES = ["site-0", "site-1"]


def job(source: str = "support.small_jobs:visits", **tables: Any):
    private = {"unit": "person", "target_epsilon": 8.0, "records_per_person": 2}
    usual: dict[str, Any] = {
        "num_sites": 2,
        "rounds": 2,
        "data": {"source": source, "partition": {"kind": "by_person"}},
        "training": {"local_steps": 2, "batch_size": 8, "optimizer": {"lr": 0.5}},
        "aggregation": {"weights": "uniform"},
        "privacy": {
            "differential_privacy": private,
            "secure_aggregation": {"enabled": True},
        },
    }
    return small_job(**usual | tables)


def test_a_run_counts_persons(tmp_path: Path) -> None:
    """In its rate, its delta and its ledgers, and calls them so."""
    result = simulate(job(), folder=tmp_path / "run", report=False)
    assert result.status == "completed"
    planned = result.view.privacy
    assert planned is not None
    assert planned.unit == "person"
    for site in planned.sites:
        assert site.sampling_rate == 8 / 32  # Of 30 persons, on the grid; 120 records.
        assert site.delta == 3e-3
    for name in SITES:
        ledger = tmp_path / "run" / "sites" / name / "ledger.jsonl"
        terms = read_file(ledger).terms
        assert (terms.unit, terms.sampling) == ("person", "poisson")
        assert terms.relation == "add or remove all records of one person"
    folder = RunFolder(tmp_path / "run")
    card = model_card(folder.view(), folder.read_job(), examine(folder.model))
    assert "any one person" in card
    assert "8 persons" in card


def test_data_that_names_no_persons_is_refused():
    """Before anything is trained, with what to do."""
    plain = {"source": "support.small_jobs:blobs"}
    sites = [{"name": name, "data": plain} for name in SITES]
    with pytest.raises(JobError, match="the person of each") as caught:
        simulate(job(sites=sites))
    assert caught.value.key == "privacy.differential_privacy.unit"
