"""A site's own model: the shared part of a run with the site's personal parts.

It never leaves the site in a run. Here it is written to a file where both are: on the
machine of a simulation, or at a site that was given the exported model.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from aggregator.model_export import file_pieces, read
from clients.models import personal
from clients.models.model_pool import ModelPool
from clients.training.local_federation import state_of
from deploy.wiring.encryption import encrypted
from deploy.wiring.run_store import open_kept
from federation.durable_files import replace_file
from federation.errors import JobError, RunNotFound
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.spec import MAX_ROUNDS, JobSpec
from federation.protocols import Buffer, ObjectStore
from federation.vectors import Role
from monitoring.runs.run_folder import RunFolder


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
    job = job_file.loads(run.read_job())
    names = [each.name for each in job.sites]
    if site not in names:
        raise JobError(
            f"the job has no site {site!r}; it has {', '.join(names)}", key="--site"
        )
    if not job.model.personal:
        raise JobError(
            "the job has no personal parts (model.personal): every site has the "
            "exported model; remove --site",
            key="--site",
        )
    run_id = run.view().started.run_id
    store = encrypted(job, open_kept(job, run, run_id), run_id=run_id)
    with contextlib.closing(store):
        pieces = site_model(
            job, run.model, run_id=RunId(run_id), site=SiteId(site), store=store
        )
        replace_file(path, pieces)


def site_model(
    job: JobSpec, shared: Path, *, run_id: RunId, site: SiteId, store: ObjectStore
) -> Iterable[Buffer]:
    """Join the shared part of a model and a site's personal parts.

    Args:
        job: The run's job.
        shared: The run's exported model.
        run_id: The run.
        site: The site.
        store: Where the site keeps its state of the run.

    Returns:
        A safetensors file, in pieces.

    Raises:
        RunNotFound: The site has no state of this run.
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
    for spec, values in layout.personal_views(own_p):
        arrays[spec.name] = values
    own_m = state.restore_integers(np.zeros(layout.num_integers, np.int64), kept)
    for spec, integers in layout.integer_views(own_m):
        if spec.role is Role.KEEP:
            arrays[spec.name] = integers
    return file_pieces(layout, arrays)
