"""A deployed site's own model: the shared part joined with its own, at the site."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import agents
from support.small_jobs import small_job

from clients.models.model_pool import ModelPool
from clients.training.local_federation import state_of
from cloud_adapters.storage.disk.store import LocalStore
from deploy.cli.commands import main
from deploy.tools.site_model import write_deployed_site_model
from federation.errors import JobError, ObjectExists, RunNotFound
from federation.ids import SiteId
from federation.job.spec import JobSpec
from privacy.membership.introduction import seal_proposal

RUN, SITE = agents.RUN_ID, "site-0"
MODEL = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [5]},
    "personal": ["3.*"],
}
SHARED = {"1.weight": np.ones((5, 4), np.float32), "1.bias": np.zeros(5, np.float32)}


def trained(folder: Path, job: JobSpec) -> Path:
    """Make the folder of a site that has trained in two rounds; its ``site.toml``."""
    path = folder / "site.toml"
    path.write_text(
        f'name = "{SITE}"\n[aggregator]\naddress = "a.example:1"\nauthority = "ca.crt"'
    )
    kept = folder / "runs" / RUN
    kept.mkdir(parents=True)
    store = LocalStore(kept)
    state = state_of(job, ModelPool(job).layout, SiteId(SITE), store)
    for round_index in (1, 2) if job.model.personal else ():
        own_p = np.full(18, round_index, np.float32)
        state.keep(RUN, round_index, {"personal": own_p})
    sealed = seal_proposal(agents.proposal(job), agents.consortium(SITE).aggregator)
    (kept / "proposal").write_bytes(sealed)
    return path


def exported(folder: Path, arrays: dict[str, Any] = SHARED) -> Path:
    """What the aggregator's operator has sent."""
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    return folder


def test_a_site_joins_the_shared_model_with_its_own_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """That of its last round; from the folder of an export, or the file in it."""
    config, given = trained(tmp_path, small_job(model=MODEL)), exported(tmp_path / "e")
    for name, model in (("one", given), ("two", given / "model.safetensors")):
        out = tmp_path / f"{name}.safetensors"
        words = ["site", "model", RUN, str(model), "--out", str(out), "--json"]
        assert main([*words, "--config", str(config)]) == 0
        assert json.loads(capsys.readouterr().out) == {"run_id": RUN, "path": str(out)}
        found = load_file(out)
        assert {*found} == {"1.weight", "1.bias", "3.weight", "3.bias"}
        np.testing.assert_array_equal(found["1.weight"], SHARED["1.weight"])
        assert (found["3.weight"] == 2).all()
    with pytest.raises(ObjectExists):
        write_deployed_site_model(config, RUN, given, tmp_path / "one.safetensors")


def test_another_model_or_run_is_named(tmp_path: Path):
    """Before a file is written."""
    config, out = trained(tmp_path, small_job(model=MODEL)), tmp_path / "out"
    wrong = {"1.weight": np.ones((6, 4), np.float32), "1.bias": SHARED["1.bias"]}
    for number, arrays in enumerate((wrong, {"1.bias": SHARED["1.bias"]})):
        given = exported(tmp_path / str(number), arrays)
        with pytest.raises(JobError, match=r"that of the run: '1\.weight'"):
            write_deployed_site_model(config, RUN, given, out)
    for name, error in (("20260102-030405-fedcba", RunNotFound), ("../x", JobError)):
        with pytest.raises(error):
            write_deployed_site_model(config, name, given, out)
    assert not out.exists()


def test_a_run_without_personal_parts_has_one_model(tmp_path: Path):
    """That which the aggregator has."""
    config = trained(tmp_path, small_job(model={**MODEL, "personal": []}))
    with pytest.raises(JobError, match="has the exported model"):
        write_deployed_site_model(config, RUN, tmp_path, tmp_path / "out")
