"""A site's own model: the shared part of a run with the site's personal parts.

It never leaves the site in a run. Here it is written to a file where both are: on the
machine of a simulation, or at a site that was given the exported model.
"""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from aggregator.model_export import Array, file_pieces, read
from clients.models import personal
from clients.models.model_pool import ModelPool
from clients.training.local_federation import state_of
from cloud_adapters.storage.disk.store import LocalStore
from deploy.site_host import config as site_file, run as site_run
from deploy.site_host.agent import PROPOSAL
from deploy.tools.export import MODEL
from deploy.wiring.encryption import encrypted
from deploy.wiring.run_store import open_kept
from federation.durable_files import replace_file
from federation.errors import JobError, ObjectExists, RunNotFound, os_errors
from federation.ids import RunId, SiteId, check_name
from federation.job import job_file
from federation.job.spec import MAX_ROUNDS, JobSpec
from federation.protocols import Buffer, ObjectStore
from federation.vectors import Layout, Role
from monitoring.runs.run_folder import RunFolder
from privacy.membership.introduction import kept_proposal


def write_site_model(run: RunFolder, site: str, path: Path) -> None:
    """Write the own model of a site of a simulated run.

    Args:
        run: A run that has ended with a model.
        site: Name of the site.
        path: The safetensors file to write.

    Raises:
        JobError: The job has no such site, or no personal parts.
        RunNotFound: The site has no state of this run.
        CorruptObject: The model or the state is damaged.
    """
    job = run.read_spec()
    names = [each.name for each in job.sites]
    if site not in names:
        raise JobError(
            f"the job has no site {site!r}; it has {', '.join(names)}", key="--site"
        )
    _check_personal(job, "--site")
    run_id = run.view().started.run_id
    store = encrypted(job, open_kept(job, run, run_id), run_id=run_id)
    with contextlib.closing(store):
        pieces = site_model(
            job, run.model, run_id=RunId(run_id), site=SiteId(site), store=store
        )
        replace_file(path, pieces)


def write_deployed_site_model(
    config_path: Path, run_id: str, shared: Path, path: Path
) -> RunId:
    """Write the own model of a deployed site, on its machine.

    Args:
        config_path: The site's ``site.toml``.
        run_id: A run that the site took part in.
        shared: What the aggregator's operator has exported of it: the model's file, or
            the folder of the export.
        path: The safetensors file to write.

    Returns:
        The run.

    Raises:
        RunNotFound: The run was not proposed to this site, or it keeps no state of it.
        JobError: The job has no personal parts, or the model is another one.
        ObjectExists: The file is there.
        CorruptObject: The model or the state is damaged.
    """
    if path.exists():
        raise ObjectExists(f"{path} exists: choose another file, or remove it")
    config = site_file.load(config_path)
    name = RunId(check_argument(run_id))
    folder = site_run.runs_folder(config) / name
    proposal = folder / PROPOSAL
    with os_errors(RunNotFound, f"read {proposal}", "name a run of this site"):
        job = job_file.loads(kept_proposal(proposal.read_bytes()).job)
    _check_personal(job, "RUN")
    file = shared / MODEL if shared.is_dir() else shared
    with contextlib.closing(LocalStore(folder)) as store:
        pieces = site_model(
            job, file, run_id=name, site=SiteId(config.file.name), store=store
        )
        replace_file(path, pieces)
    return name


def check_argument(run_id: str) -> str:
    """Check a run ID from the command line, which becomes a part of a path.

    Raises:
        JobError: It is no run ID.
    """
    try:
        return check_name(run_id)
    except ValueError as error:
        raise JobError(f"{error}; `crossfed ps` lists runs", key="RUN") from error


def _check_personal(job: JobSpec, key: str) -> None:
    if not job.model.personal:
        raise JobError(
            "the job has no personal parts (model.personal): every site has the "
            f"exported model; remove {key}, and use that one",
            key=key,
        )


def site_model(
    job: JobSpec, shared: Path, *, run_id: RunId, site: SiteId, store: ObjectStore
) -> Iterable[Buffer]:
    """Join the shared part of a model and a site's personal parts.

    Args:
        job: The run's job.
        shared: The run's exported model.
        run_id: ID of the run that the state must belong to.
        site: Site whose personal parts are joined.
        store: Where the site keeps its state of the run.

    Returns:
        A safetensors file, in pieces.

    Raises:
        RunNotFound: The site has no state of this run.
        JobError: The file belongs to another model.
        CorruptObject: The model or the state is damaged.
    """
    pool = ModelPool(job)
    state, layout = state_of(job, pool.layout, site, store), pool.layout
    kept = state.before(run_id, MAX_ROUNDS + 1)
    own_p = personal.own_part(kept.arrays)
    if own_p is None:
        raise RunNotFound(
            f"{store.url} has no personal parts of site {site!r} and run {run_id}: the "
            "site never trained, or keeps its state elsewhere"
        )
    arrays = read(shared)
    _check_fits(layout, arrays, shared)
    for spec, values in layout.personal_views(own_p):
        arrays[spec.name] = values
    own_m = state.restore_integers(np.zeros(layout.num_integers, np.int64), kept)
    for spec, integers in layout.integer_views(own_m):
        if spec.role is Role.KEEP:
            arrays[spec.name] = integers
    return file_pieces(layout, arrays)


def _check_fits(layout: Layout, arrays: Mapping[str, Array], file: Path) -> None:
    """Check that a file has every shared tensor of a model."""
    for spec in layout.tensors:
        found = arrays.get(spec.name)
        if spec.role is Role.PERSONAL or (found is None and spec.role is Role.FROZEN):
            continue
        if found is None or found.shape != spec.shape:
            here = "no such tensor" if found is None else f"shape {list(found.shape)}"
            raise JobError(
                f"{file} belongs to another model than that of the run: {spec.name!r} "
                f"has shape {list(spec.shape)} in the model and the file has {here}",
                key="MODEL",
            )
