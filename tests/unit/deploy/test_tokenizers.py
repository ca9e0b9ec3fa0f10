"""A job names its tokenisers, and sites whose data use others refuse it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import agents
from support.agents import consortium
from support.small_jobs import small_job

from clients.models.tokenizers import note_tokenizer, noted_tokenizers, notice
from deploy.site_host import data as site_data
from deploy.site_host.config import AggregatorSpec, LocalDataSpec, SiteFile
from deploy.wiring import job_data, parts as wiring
from federation.errors import JobError
from federation.job import job_digest, job_file
from federation.job.spec import JobSpec

OURS, THEIRS, OTHER = (digit * 64 for digit in "abc")
SOURCE = "support.small_jobs:tokenized"


def source(*digests: str) -> dict[str, Any]:
    return {"source": SOURCE, "options": {"digests": list(digests)}}


def job_of(*sites: Sequence[str], named: Sequence[str] = ()) -> JobSpec:
    """Sites with data of their own, each from a source that loads tokenisers."""
    model = {
        "factory": "clients.models:logistic_regression",
        "options": {"inputs": 4, "classes": 3},
        "tokenizers": list(named),
    }
    tables = [
        {"name": f"site-{index}", "data": source(*digests)}
        for index, digests in enumerate(sites)
    ]
    return small_job(model=model, sites=tables)


def test_sites_of_a_simulation_load_the_same_tokenizers():
    """Whether or not the job names them; one site may hold numbers already."""
    for sites, named in (
        ([[OURS], [OURS]], []),
        ([[OURS, OTHER], [OTHER, OURS]], [OURS, OTHER]),
        ([[], []], []),
        ([[], [OURS], []], []),
    ):
        assert len(wiring.deal_data(job_of(*sites, named=named))) == len(sites)
    with pytest.raises(JobError, match="the same files") as found:
        wiring.deal_data(job_of([], [OURS], [THEIRS]))
    assert found.value.key == "model.tokenizers"
    assert f"of site 'site-1' has loaded the tokeniser {OURS}" in found.value.reason
    assert f"that of site 'site-2' {THEIRS}" in found.value.reason


@pytest.mark.parametrize("loaded", [[THEIRS], [OURS, THEIRS], []])
def test_a_source_that_loads_others_is_refused(loaded: list[str]):
    """Also one that loads none, for instance because it has kept an old one."""
    with pytest.raises(JobError, match=f"names {OURS}, and the data source {SOURCE}"):
        wiring.deal_data(job_of([OURS], loaded, named=[OURS]))
    dealt = small_job(
        model={"factory": "clients.models:mlp", "tokenizers": [OURS]},
        data=source(*loaded),
    )
    with pytest.raises(JobError, match="load the job's tokeniser"):
        wiring.deal_data(dealt)


def deployed(job: JobSpec, **data: Any) -> None:
    """Load a deployed site's own data."""
    file = SiteFile(
        name="site-0",
        aggregator=AggregatorSpec(address="127.0.0.1:1", authority="ca.crt"),
        data=LocalDataSpec(**data),
    )
    site_data.load(file, job, lambda store, *_: store)


def test_a_deployed_site_refuses_a_job_with_another_tokenizer(tmp_path: Path):
    """The aggregator hears of the rule, and of no file of the site."""
    job = job_of([], named=[OURS])
    deployed(job, **source(OURS))
    with pytest.raises(JobError, match=THEIRS) as found:
        deployed(job, **source(THEIRS))
    assert THEIRS not in found.value.outside
    assert found.value.outside.startswith("model.tokenizers: the data source here")
    url = f"file://{tmp_path / 'numbers'}"
    job_data.shard(SOURCE, url, {"digests": []}, name="n", report=lambda _: None)
    deployed(job, source=url)


def test_the_aggregator_hears_why_a_site_refuses(tmp_path: Path):
    """Before the first round, without a digest of the site's files."""
    members = consortium("site-0", "site-1")
    agent = agents.agent(tmp_path, "site-0", members, data=source(THEIRS))
    model = job_file.document(job_of([], named=[OURS]))["model"]
    job = small_job(num_sites=2, model=model)
    said = agents.propose(agent, members, agents.proposal(job)).refused
    assert said.startswith("model.tokenizers: the data source here has not loaded")
    assert THEIRS not in said


def test_tokenizers_are_a_part_of_the_job():
    """Jobs without keep their digest; a digest is a digest."""
    assert "tokenizers" not in job_digest.deciding(job_of([]))["model"]
    decided = job_digest.deciding(job_of([], named=[OURS]))
    assert decided["model"]["tokenizers"] == [OURS]
    with pytest.raises(JobError, match="not a digest of 64") as found:
        job_of([], named=[OURS, "bert-base-uncased"])
    assert found.value.key == "model.tokenizers[1]"


def test_only_what_is_loaded_meanwhile_is_noted():
    """A collection around another one has what is loaded in both."""
    note_tokenizer(OTHER)
    with noted_tokenizers() as outer:
        note_tokenizer(OURS)
        with noted_tokenizers() as inner:
            note_tokenizer(THEIRS)
    assert (outer, inner) == ([OURS, THEIRS], [THEIRS])


def test_a_job_that_allows_any_is_advised_to_name_them():
    with noted_tokenizers() as loaded:
        wiring.deal_data(job_of([OURS], [OURS]))
    said = notice(job_of([OURS], [OURS]), loaded)
    assert said.endswith(f'set model.tokenizers = ["{OURS}"]')
    assert notice(job_of([], named=[OURS]), loaded) == ""
    assert notice(job_of([]), []) == ""
