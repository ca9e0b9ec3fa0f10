"""What a deployed site trains on: its own data, or its part of a rehearsal's."""

import logging

from deploy import wiring
from deploy.data import load_data
from deploy.site_file import SiteFile
from deploy.source_check import check_deployed
from deploy.store_meters import Watch
from deploy.user_code import unable_to_exit
from federation.errors import FederationError, JobError, SiteError
from federation.ids import SiteId
from federation.job import JobSpec

_LOG = logging.getLogger(__name__)


def load(file: SiteFile, job: JobSpec, watch: Watch) -> wiring.SiteData:
    """Load a site's training and held-out data.

    Args:
        file: Names them, unless it is a rehearsal with the job's dataset.
        job: The job.
        watch: Notes what the store is used for that holds them.

    Raises:
        JobError: They would be at an address that somebody else gave, or the job's
            unit of privacy does not permit how they were prepared.
        SiteError: They cannot be loaded; why, is told to the site's log alone.
    """
    data = _own(file, watch) if file.data.source else _rehearsed(file, job)
    check_deployed(
        job,
        file.name,
        data[0],
        source=file.data.source,
        vouched=file.data.preprocessing,
    )
    return data


def _rehearsed(file: SiteFile, job: JobSpec) -> wiring.SiteData:
    named = [job.data, *(site.data for site in job.sites)]
    if job.data is None or any(d is not None and "://" in d.source for d in named):
        # A site opens no address that somebody else gives it.
        raise JobError(
            f"site {file.name!r} has no data of its own: its operator must name "
            "their source in site.toml",
            key="data.source",
        )
    return wiring.deal_data(job)[SiteId(file.name)]


def _own(file: SiteFile, watch: Watch) -> wiring.SiteData:
    try:
        with unable_to_exit():
            return load_data(file.data.source, file.data.options, watch=watch)
    except FederationError as error:
        _LOG.error("data of site %s cannot be loaded: %s", file.name, error)
        raise SiteError(
            f"site {file.name!r} cannot load its data; its log says why"
        ) from error
