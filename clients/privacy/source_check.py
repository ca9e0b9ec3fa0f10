"""Whether a job's unit of privacy permits how its data were prepared."""

from collections.abc import Mapping

from clients import preprocessing
from clients.data.datasets import Dataset
from clients.factories import import_factory
from clients.privacy.policy_spec import FILL_IN
from clients.shards.dataset import ShardedDataset
from federation.errors import JobError
from federation.ids import SiteId
from federation.job.code_files import unpinned
from federation.job.spec import JobSpec

_HOW = "docs/howto/own-model-and-data.md, 'Preprocessing and privacy', explains it"


def declared(source: str, train: Dataset, *, key: str = "data") -> str:
    """Return the preprocessing that a source declares; empty if it declares none.

    Args:
        source: ``module:function``, or the URL of a dataset in shards.
        train: Its training part.
        key: Table of the file that names the source.

    Raises:
        JobError: There is no such function, or it declares an unknown word.
    """
    if isinstance(train, ShardedDataset):
        return train.index.preprocessing
    if "://" in source:
        return ""
    function = import_factory(source, key=f"{key}.source")
    return preprocessing.declared_by(
        function, name=unpinned(source), key=f"{key}.source"
    )


def check_simulated(
    job: JobSpec, site_data: Mapping[SiteId, tuple[Dataset, Dataset]]
) -> None:
    """Check the sources of a simulation.

    Args:
        job: Sets the unit of privacy, and may vouch for sources.
        site_data: Training and held-out data of every site that trains here.

    Raises:
        JobError: A source may not be used under the job's unit of privacy, or does not
            declare its preprocessing and the job does not vouch for it.
    """
    unit = job.privacy.differential_privacy.unit
    for index, site in enumerate(job.sites):
        used = site.data or job.data
        if unit == "none" or used is None or SiteId(site.name) not in site_data:
            continue
        key = "data" if site.data is None else f"sites[{index}].data"
        kind = declared(used.source, site_data[SiteId(site.name)][0], key=key)
        if not kind and job.simulation.vouch_for_sources:
            continue
        why = preprocessing.fault(kind, unit, is_dealt=_is_dealt(job, site.data))
        if why is not None:
            raise JobError(
                f"{unpinned(used.source)} {why}{_advice(used.source, kind)}",
                key=f"{key}.source",
            )


def check_deployed(
    job: JobSpec, site: str, kind: str | None, *, source: str, vouched: str
) -> None:
    """Check what a deployed site trains on.

    Args:
        job: Sets the unit of privacy.
        site: Name of the site.
        kind: What the source declares; None if that is not known.
        source: Source of its own data; empty for its part of the job's, in a rehearsal.
        vouched: What the operator says of the source (``data.preprocessing``).

    Raises:
        JobError: As ``check_simulated``; or source and operator contradict each other.
    """
    unit = job.privacy.differential_privacy.unit
    if unit == "none":
        return
    if kind and vouched and kind != vouched:
        raise JobError(
            f"site {site!r} states {vouched!r} in site.toml (data.preprocessing), but "
            f"its source declares {kind!r}: delete it there",
            key="privacy.differential_privacy.unit",
        )
    is_dealt = not source and _is_dealt(job, None)
    why = preprocessing.fault(kind or vouched, unit, is_dealt=is_dealt)
    if why is not None:
        if kind is None and not vouched:
            why = "was not loaded, and may not declare its preprocessing"
        raise JobError(
            f"the source of site {site!r} {why}; its operator can declare it in "
            f"site.toml (data.preprocessing). {_HOW}",
            key="privacy.differential_privacy.unit",
            remedy={} if kind or vouched else {"data.preprocessing": FILL_IN},
        )


def _is_dealt(job: JobSpec, own: object) -> bool:
    return own is None and sum(site.data is None for site in job.sites) > 1


def _advice(source: str, kind: str) -> str:
    if kind:
        return f". {_HOW}"
    if "://" in source:
        return (
            "; write it again with `crossfed data shard --replace` from a source that "
            f"declares it, or set simulation.vouch_for_sources. {_HOW}"
        )
    function = source.rpartition(":")[2]
    return (
        f'; set `{function}.preprocessing = "none"` beside the function if each record '
        "is prepared by itself, or set simulation.vouch_for_sources, which a deployed "
        f"site ignores: there, data.preprocessing in site.toml is enough. {_HOW}"
    )
