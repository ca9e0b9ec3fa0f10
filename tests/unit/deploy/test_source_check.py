"""Under a unit of privacy no record is prepared with statistics of others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.noisy_jobs import noisy_job
from support.small_jobs import small_job

from clients.privacy.source_check import check_deployed
from deploy.site_host import data as site_data
from deploy.site_host.config import AggregatorSpec, LocalDataSpec, SiteFile
from deploy.wiring import job_data as data, parts as wiring
from federation.errors import JobError
from federation.job.spec import JobSpec, SiteDataSpec

USERS = "support.users_module"
MODEL = {"options": {"inputs": 2, "classes": 2}}


def job_of(unit: str, source: str, *, is_dealt: bool = True, **tables: Any) -> JobSpec:
    """A job of three sites whose data come from a source."""
    sites = [{"name": f"site-{i}"} for i in range(3)]
    if is_dealt:
        tables |= {"data": {"source": source}}
    else:
        sites = [site | {"data": {"source": source}} for site in sites]
    if unit == "none":
        model = {"factory": "clients.models:logistic_regression", **MODEL}
        return small_job(model=model, **(tables | {"sites": sites}))
    return noisy_job(unit, **({"model": MODEL, "sites": sites} | tables))


def build(unit: str, source: str, **options: Any) -> None:
    wiring.build_federation(job_of(unit, source, **options))


@pytest.mark.parametrize("unit", ["joint", "site"])
def test_undeclared_sources_are_refused(unit: str):
    """With the key, what to write and where; unless the job vouches for them."""
    source = f"{USERS}:undeclared"
    expected = (
        rf"data.source: {source} does not declare its preprocessing, .*'{unit}'"
        r".*undeclared.preprocessing = \"none\".*data\.preprocessing in site\.toml"
    )
    with pytest.raises(JobError, match=expected):
        build(unit, source)
    with pytest.raises(JobError, match=r"sites\[0\].data.source: .*does not declare"):
        build(unit, source, is_dealt=False)
    build(unit, source, simulation={"vouch_for_sources": True})
    build("none", source)


@pytest.mark.parametrize("vouched", [False, True])
def test_own_statistics_are_for_whole_sites_with_data_of_their_own(*, vouched: bool):
    """Of data that is dealt out they are everybody's. Vouching does not help."""
    source, simulation = f"{USERS}:own_means", {"vouch_for_sources": vouched}
    build("site", source, is_dealt=False, simulation=simulation)
    build("none", source)
    with pytest.raises(JobError, match="statistics over the data"):
        build("site", source, simulation=simulation)
    with pytest.raises(JobError, match="statistics of the site's"):
        build("joint", source, is_dealt=False, simulation=simulation)


def test_shards_keep_what_their_source_declares(tmp_path: Path):
    """A dataset of an undeclared source says nothing."""
    for name in ("own_means", "undeclared"):
        url = f"file://{tmp_path / name}"
        data.shard(f"{USERS}:{name}", url, {}, name=name, report=lambda _: None)
    assert data.info(f"file://{tmp_path / 'own_means'}")["preprocessing"] == "own"
    assert data.info(f"file://{tmp_path / 'undeclared'}")["preprocessing"] == ""
    build("site", f"file://{tmp_path / 'own_means'}", is_dealt=False)
    with pytest.raises(JobError, match="statistics of the site's"):
        build("joint", f"file://{tmp_path / 'own_means'}", is_dealt=False)
    with pytest.raises(JobError, match="crossfed data shard --replace"):
        build("joint", f"file://{tmp_path / 'undeclared'}", is_dealt=False)


def deployed(job: JobSpec, **table: Any) -> None:
    """Load and check a deployed site's data."""
    site = SiteFile(
        name="site-1",
        aggregator=AggregatorSpec(address="127.0.0.1:1", authority="ca.crt"),
        data=LocalDataSpec(**table),
    )
    loaded = site_data.load(site, job, lambda store, *_: store)
    own = site.data
    kind = site_data.declared(site, job, loaded)
    check_deployed(job, site.name, kind, source=own.source, vouched=own.preprocessing)


def test_operators_vouch_for_their_sources():
    """Nothing that a job says does so for them."""
    source = f"{USERS}:undeclared"
    job = job_of("joint", source, simulation={"vouch_for_sources": True})
    for table in ({"source": source}, {}):
        with pytest.raises(JobError, match=r"'site-1' does not declare.*data.preproc"):
            deployed(job, **table)
        for kind in ("none", "public"):
            deployed(job, preprocessing=kind, **table)
        for kind in ("own", "pooled"):
            with pytest.raises(JobError, match="have no noise"):
                deployed(job, preprocessing=kind, **table)
    deployed(job_of("site", source), source=source, preprocessing="own")
    with pytest.raises(JobError, match="several sites"):
        deployed(job_of("site", source), preprocessing="own")
    deployed(job_of("none", source), source=source)


def test_operator_and_source_may_not_contradict_each_other():
    """One of the two is wrong."""
    source = f"{USERS}:own_means"
    with pytest.raises(JobError, match=r"'none' in site.toml .* declares 'own'"):
        deployed(job_of("site", source), source=source, preprocessing="none")


def test_a_site_loads_nothing_that_a_job_names_for_single_sites():
    """Neither its own, nor in a rehearsal that of another site."""
    source = f"{USERS}:own_means"
    job = job_of("site", source, is_dealt=False)
    with pytest.raises(JobError, match=r"must set data\.source in site\.toml"):
        deployed(job)
    deployed(job, source=source)
    dealt = job_of("none", f"{USERS}:undeclared")
    others = SiteDataSpec(source="there.is:nothing")
    sites = [replace(s, data=others) for s in dealt.sites if s.name != "site-1"]
    mine = [s for s in dealt.sites if s.name == "site-1"]
    deployed(replace(dealt, sites=(*sites, *mine)))


def test_an_operator_learns_that_persons_have_several_records(
    caplog: pytest.LogCaptureFixture,
):
    """In the site's log, if single records are protected; the names are not in it."""
    source = "support.small_jobs:visits"
    for unit, notes in (("record", 1), ("none", 0)):
        caplog.clear()
        deployed(job_of(unit, source), source=source)
        found = [r.getMessage() for r in caplog.records if "persons" in r.getMessage()]
        assert len(found) == notes
        assert all('use unit = "person"' in text for text in found)


def test_only_what_sites_share_may_be_at_two_of_them(tmp_path: Path):
    """An operator's own data are at one site, whatever a job says."""
    url, other = (f"file://{tmp_path / name}" for name in ("shared", "other"))
    data.shard("clients.data:digits", url, {}, name="d", report=lambda _: None)
    sites = [{"name": f"site-{i}", "data": {"source": url}} for i in range(3)]
    job = small_job(sites=sites, schedule={"replicas": [["site-0", "site-1"]]})
    file = SiteFile(
        name="site-0",
        data=LocalDataSpec(source=url),
        aggregator=AggregatorSpec(address="127.0.0.1:1", authority="ca.crt"),
    )
    assert len(site_data.load(file, job, lambda store, *_: store)[0])
    for own in (other, "clients.data:digits"):
        mine = replace(file, data=LocalDataSpec(source=own))
        with pytest.raises(JobError, match=r"replicas: site 'site-0' .*of its own"):
            site_data.load(mine, job, lambda store, *_: store)
    moving = small_job(
        num_sites=3,
        data={"source": url, "placement": "dynamic"},
        training={"local_epochs": 1},
    )
    train, held_out = site_data.load(file, moving, lambda store, *_: store)
    assert (len(train), len(held_out)) == (1438, 120)
    line = site_data.describe(file, wiring.build_federation(moving))
    assert "the job's dataset" in line
    assert "own source" not in line
    mine = replace(file, data=LocalDataSpec(source=other))
    with pytest.raises(JobError, match="never leave"):
        site_data.load(mine, moving, lambda store, *_: store)
    apart = [*sites[:1], {"name": "site-1"}, *sites[2:]]
    with pytest.raises(JobError, match=r"replicas\[0\]: .*same data"):
        small_job(sites=apart, schedule={"replicas": [["site-0", "site-1"]]})
    with pytest.raises(JobError, match=r"replicas.*no site.*'nobody'"):
        small_job(schedule={"replicas": [["site-0", "nobody"]]})
