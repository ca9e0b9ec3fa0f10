"""A deployed site's data: its own, or its share of a rehearsal's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from clients.data.privacy_units import note_on_persons
from clients.factories import (
    Factory,
    call_factory,
    import_factory,
    needed_options,
)
from clients.models.tokenizers import check_tokenizers, noted_tokenizers
from clients.preprocessing import declared_by
from clients.privacy import dataset_name, source_check
from clients.privacy.ledger_memory import note_content, one_budget
from clients.privacy.policy_spec import FILL_IN
from clients.privacy.public_moments import standardised
from clients.privacy.site_memory import SiteMemory
from clients.privacy.site_policy import rehearses
from clients.statistics import columns
from clients.training.local_federation import Federation, SiteData
from clients.user_code import unable_to_exit
from deploy.site_host.config import SiteFile
from deploy.wiring import parts as wiring
from deploy.wiring.job_data import load_data
from deploy.wiring.store_meters import Watch
from federation.errors import NO_REMEDY, FederationError, JobError
from federation.ids import SiteId
from federation.job.code_files import unpinned
from federation.job.metrics import is_function
from federation.job.spec import JobSpec, SiteDataSpec
from federation.job.statistics_checks import table
from federation.rounds.local_work import moves_data

_LOG = logging.getLogger(__name__)

CANNOT_LOAD = "cannot load the data of site"
"""Begins the message in a site's log that says why its data cannot be loaded."""


def load(file: SiteFile, job: JobSpec, watch: Watch) -> SiteData:
    """Load a site's training and held-out data.

    Args:
        file: Names them, unless it is a rehearsal with the job's dataset.
        job: As proposed by the aggregator.
        watch: Notes what the store is used for that holds them.

    Raises:
        SiteError: They lack columns that a job of statistics asks about.
        JobError: They would be at an address from someone else, or their source has
            loaded another tokeniser than the job names; or they cannot be loaded, and
            only the site's log says why.
    """
    if file.data.source and moves_data(job):
        data = _shared(file, job)
    elif file.data.source:
        _check_shared(file, job)
        data = _own(file, job, watch)
    else:
        data = _rehearsed(file, job)
    data = standardised(job, data, f"site {file.name!r}")
    if job.statistics is not None:
        columns.read(table(job), data[0], SiteId(file.name), _LOG.warning)
    note = note_on_persons(job, data[0])
    if note:
        _LOG.warning("site %s: %s", file.name, note)
    return data


def _check_shared(file: SiteFile, job: JobSpec) -> None:
    """Refuse to be a replica with other data than the job names for the group."""
    (own,) = (site.data for site in job.sites if site.name == file.name)
    if not any(file.name in group for group in job.schedule.replicas):
        return
    if own is None or "://" not in own.source or own.source != file.data.source:
        raise JobError(
            f"site {file.name!r} has data of its own, of which no other site has a "
            "copy: take it out of schedule.replicas, or name the bucket that the sites "
            "of its group share, both in the job (sites.data.source) and in site.toml "
            "(data.source)",
            key="schedule.replicas",
        )


def _shared(file: SiteFile, job: JobSpec) -> SiteData:
    """Load a dataset that all sites can read, if its operator says that it is one."""
    assert job.data is not None  # noqa: S101 -- as its data move
    source, options = file.data.source, file.data.options
    if "://" not in source or source != job.data.source:
        raise JobError(
            f"site {file.name!r} has data of its own, which never leave it: use "
            '"static", or name one dataset in a bucket both in the job and in '
            "data.source of every site.toml",
            key="data.placement",
        )
    # Where it is read, and with which key, only the operator says.
    named = replace(job.data, source=source, options=options)
    with _told_to_the_log(file, job):
        return wiring.deal_part(replace(job, data=named), SiteId(file.name))


def _rehearsed(file: SiteFile, job: JobSpec) -> SiteData:
    if not rehearses(job, SiteId(file.name)):
        raise JobError(
            f"site {file.name!r} has no data of its own: its operator must set "
            "data.source in site.toml",
            key="data.source",
        )
    with _told_to_the_log(file):
        return wiring.deal_part(job, SiteId(file.name))


def describe(file: SiteFile, met: Federation) -> str:
    """Say on which data a site works; it is for the site's own log."""
    train, held_out = met.site_data[SiteId(file.name)]
    count = f"{len(train)} training and {len(held_out)} held-out records"
    if not file.data.source:
        whose = "no data of its own: works on its share of the job's dataset"
        return f"has {whose}, {count}"
    options = file.data.options.items()
    given = "".join(f", {name} = {value!r}" for name, value in options)
    if moves_data(met.job):
        whose = "the job's dataset, a different part of it in each round"
        return f"works on {whose}: {file.data.source}{given}; {count}"
    instead = "" if met.job.data is None else ", not on the job's [data]"
    return f"works on its own source {file.data.source}{given}{instead}; {count}"


def own_data(file: SiteFile, job: JobSpec) -> dict[str, Any]:
    """Values of ``[data]`` with which a site would train on data of its own.

    Numbers and functions among its options are those of the job, if it names any;
    texts, such as paths, are for the operator to fill in.
    """
    (own,) = (site.data for site in job.sites if site.name == file.name)
    spec, function = own or job.data, _function(file)
    if spec is None or "://" in spec.source:
        spec = SiteDataSpec(
            source=f"{FILL_IN}: ./file.py:function", options={"file": FILL_IN}
        )
    options = {name: _hint(value) for name, value in spec.options.items()}
    if function is not None:
        known = options | dict(file.data.options)
        options = needed_options(function, known, FILL_IN)
    source = file.data.source or unpinned(spec.source)
    return {"data.source": source, "data.options": options}


def declared(file: SiteFile, job: JobSpec, data: SiteData | None) -> str | None:
    """Return the preprocessing that a site's source declares, empty for none.

    Args:
        file: The operator's ``site.toml``.
        job: As proposed by the aggregator.
        data: Training and held-out data; None if they were not loaded.

    Returns:
        None if data were not loaded, and the operator has not named their source.
    """
    source = file.data.source or ("" if job.data is None else job.data.source)
    if data is not None:
        return source_check.declared(source, data[0])
    function = _function(file)
    return None if function is None else declared_by(function, name=unpinned(source))


def _function(file: SiteFile) -> Factory | None:
    """The function that the operator has named, if it can be imported."""
    source = file.data.source
    with suppress(FederationError), unable_to_exit():  # The log has it already.
        return import_factory(source) if source and "://" not in source else None
    return None


def _hint(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return unpinned(value) if is_function(value) else FILL_IN


def note_changes(file: SiteFile, data: SiteData, memory: SiteMemory) -> None:
    """Warn the site's operator if its own data have changed since an earlier run.

    Args:
        file: Names the data.
        data: Training and held-out data, as they are now.
        memory: Memory of the site.

    Raises:
        JobError: They cannot be read; only the site's log says why.
        StoreError: The memory cannot be read or written.
    """
    if not file.data.source:  # A rehearsal's differ from job to job.
        return
    parts = dict(zip(("train", "held_out"), data, strict=True))
    with _told_to_the_log(file):
        digest = call_factory(dataset_name.digest, parts)
    if note_content(memory, file.data.name, digest):
        _LOG.warning(
            "the data of site %s has changed since an earlier run: %s",
            file.name,
            one_budget(file.data.name),
        )


def _own(file: SiteFile, job: JobSpec, watch: Watch) -> SiteData:
    with _told_to_the_log(file, job), noted_tokenizers() as loaded:
        found = load_data(file.data.source, file.data.options, watch=watch)
    check_tokenizers(job, loaded, source=file.data.source)
    return found


@contextmanager
def _told_to_the_log(file: SiteFile, job: JobSpec | None = None) -> Iterator[None]:
    try:
        with unable_to_exit():
            yield
    except FederationError as error:
        key = error.key if isinstance(error, JobError) else None
        if key and not file.data.source:
            raise  # The job is wrong.
        cause, where = error.__cause__, ""
        path = cause.filename if isinstance(cause, OSError) else None
        if isinstance(path, str) and not Path(path).is_absolute():
            where = f"; relative to the agent's working folder: {Path(path).absolute()}"
        _LOG.error("%s %s: %s%s", CANNOT_LOAD, file.name, error, where)
        told = f"site {file.name!r} cannot load its data; its log says why"
        raise JobError(
            told,
            outside=told,  # Whatever the cause.
            remedy=own_data(file, job) if job and key == "data.options" else NO_REMEDY,
        ) from error
