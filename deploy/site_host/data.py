"""A deployed site's data: its own, or its share of a rehearsal's."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from clients.data.privacy_units import note_on_persons
from clients.factories import call_factory
from clients.models.tokenizers import check_tokenizers, noted_tokenizers
from clients.privacy import dataset_name
from clients.privacy.ledger_memory import note_content, one_budget
from clients.privacy.site_memory import SiteMemory
from clients.privacy.site_policy import rehearses
from clients.training.local_federation import SiteData
from clients.user_code import unable_to_exit
from deploy.site_host.config import SiteFile
from deploy.wiring import parts as wiring
from deploy.wiring.job_data import load_data
from deploy.wiring.store_meters import Watch
from federation.errors import FederationError, JobError, SiteError
from federation.ids import SiteId
from federation.job.code_files import unpinned
from federation.job.spec import JobSpec

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
        JobError: They would be at an address from someone else, or their source has
            loaded another tokeniser than the job names.
        SiteError: They cannot be loaded; only the site's log says why.
    """
    data = _own(file, job, watch) if file.data.source else _rehearsed(file, job)
    note = note_on_persons(job, data[0])
    if note:
        _LOG.warning("site %s: %s", file.name, note)
    return data


def _rehearsed(file: SiteFile, job: JobSpec) -> SiteData:
    if not rehearses(job, SiteId(file.name)):
        (own,) = (site.data for site in job.sites if site.name == file.name)
        named = "" if own is None or "://" in own.source else unpinned(own.source)
        raise JobError(
            f"site {file.name!r} has no data of its own: its operator must set "
            "data.source in site.toml",
            key="data.source",
            remedy={"data.source": named or "./my_data.py:load"},
        )
    return wiring.deal_part(job, SiteId(file.name))


def describe(file: SiteFile) -> str:
    """Say on which data a site trains."""
    if file.data.source:
        return f"trains on its own source {file.data.source}, not on the job's [data]"
    return "has no data of its own: trains on its share of the job's dataset"


def note_changes(file: SiteFile, data: SiteData, memory: SiteMemory) -> None:
    """Warn the site's operator if its own data have changed since an earlier run.

    Args:
        file: Names the data.
        data: Training and held-out data, as they are now.
        memory: Memory of the site.

    Raises:
        SiteError: They cannot be read; only the site's log says why.
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
    with _told_to_the_log(file), noted_tokenizers() as loaded:
        found = load_data(file.data.source, file.data.options, watch=watch)
    check_tokenizers(job, loaded, source=file.data.source)
    return found


@contextmanager
def _told_to_the_log(file: SiteFile) -> Iterator[None]:
    try:
        with unable_to_exit():
            yield
    except FederationError as error:
        _LOG.error("%s %s: %s", CANNOT_LOAD, file.name, error)
        raise SiteError(
            f"site {file.name!r} cannot load its data; its log says why"
        ) from error
