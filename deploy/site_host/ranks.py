"""Ranks of a deployed site: whether a job can use them, and their environment.

The agent keeps keys, ledger and protocol. A rank gets the job, the site's data source
and weights, and an environment without credentials that its data does not need. That is
order, not a wall: a rank runs as the same user as the agent.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from tempfile import TemporaryDirectory

import tomli_w
import torch

from clients.privacy.site_plans import MakePrivate
from clients.privacy.standardise import Statistics
from clients.ranks.checks import check_devices, check_shardable, check_shares
from clients.ranks.control import Start
from clients.ranks.group import RankGroup
from clients.ranks.ranked_trainer import RankedTrainer
from clients.ranks.shared_model import SharedModel
from clients.training.local_federation import Federation, SiteData
from clients.training.private_steps import PrivateTraining, takes_private_steps
from cloud_adapters.urls import parse_url
from deploy.site_host.config import LocalDataSpec, SiteFile
from federation.errors import JobError
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.methods.method import Thing
from federation.methods.registry import excluding
from federation.protocols import Trainer
from federation.vectors import Layout

MODULE = "deploy.site_host.rank_process"

# Where programs, libraries, modules and caches are, and how to compute.
_PLAIN = (
    "PATH", "HOME", "LANG", "LC_*", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONWARNINGS",
    "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "CROSSFED_CACHE_*", "CUDA_*", "NVIDIA_*",
    "NCCL_*", "OMP_*", "MKL_*", "TORCH*", "PYTORCH_*", "TRITON_*", "CC", "CXX",
    "CROSSFED_CODE",
)  # fmt: skip
# What the clients of object stores and key services look for.
_CLOUD = (
    "AWS_*",
    "GOOGLE_*",
    "CLOUDSDK_*",
    "GCE_*",
    "SSL_CERT_*",
    "*_PROXY",
    "*_proxy",
)


def check_gpus(file: SiteFile) -> None:
    """Refuse to work without the GPUs that the operator pays for.

    Raises:
        JobError: There are fewer.
    """
    wanted, found = file.compute.gpus, 0
    if wanted:  # It takes seconds, and opens the devices.
        found = torch.cuda.device_count()
    if found < wanted:
        raise JobError(
            f"this site needs {wanted} GPUs and sees {found}: install NVIDIA's driver "
            "and a torch for CUDA, let the service use the devices "
            "(deploy/systemd/nvidia.conf), or set it to 0 to train with the CPU",
            key="compute.gpus",
        )


def check_job(job: JobSpec, file: SiteFile, data: SiteData) -> None:
    """Check that the site's ranks can train a job; a single rank can train any.

    Raises:
        JobError: It cannot; ``key`` is the key of the job.
        SiteError: There are fewer examples than ranks, or fewer GPUs.
    """
    ranks = file.compute.ranks
    if not uses_ranks(job, file):
        return
    site = f"site {file.name!r} trains with {ranks} ranks (compute.ranks)"
    for method, reason in excluding(job, Thing.RANKS):
        raise JobError(
            f"{site}, but {reason}, or {method.instead}", key=method.places(job)[0]
        )
    if job.training.device.startswith("cuda:"):
        raise JobError(
            f"{site}, but {job.training.device!r} is a single device: use cuda or auto",
            key="training.device",
        )
    if file.compute.sharding == "full" and takes_private_steps(job):
        raise JobError(
            f"{site} that shard the model (compute.sharding), but private steps need a "
            "sum of clipped gradients for the whole model on each rank: ask its "
            'operator to set compute.sharding = "none"',
            key="privacy.differential_privacy.unit",
        )
    check_devices(job, ranks, is_sharded=file.compute.sharding == "full")
    check_shares(job, SiteId(file.name), data[0], ranks)


def uses_ranks(job: JobSpec, file: SiteFile) -> bool:
    """Whether ranks train a job, or the agent does it itself.

    Compiled code is loaded where there are no keys: it takes a rank, if only one.
    """
    compute = file.compute
    return compute.ranks > 1 or (compute.compile and not takes_private_steps(job))


def agents_job(job: JobSpec, file: SiteFile) -> JobSpec:
    """Return the job for the agent's own model, which needs no GPU if ranks train."""
    if not uses_ranks(job, file):
        return job
    return replace(job, training=replace(job.training, device="cpu"))


def trainer_of(
    federation: Federation, file: SiteFile, stack: ExitStack
) -> Callable[[], Trainer]:
    """Choose what trains a job without differential privacy at a site.

    That is its agent, or ranks that begin to start now.

    Args:
        federation: Model and data of the run, as the agent has them.
        file: The site's configuration.
        stack: Ends the ranks.

    Raises:
        JobError: The site's ranks cannot train this job.
        SiteError: There are fewer examples than ranks, or they cannot be started.
    """
    if not uses_ranks(federation.job, file):
        return partial(federation.trainer, SiteId(file.name))
    layout = _checked_layout(federation, file)
    ranks = ranked_trainer(
        federation.job, file, layout, order_seed=federation.order_seed
    )
    trainer = stack.enter_context(ranks)
    return lambda: trainer


def private_maker(
    federation: Federation, file: SiteFile, stack: ExitStack
) -> MakePrivate | None:
    """Choose what takes a site's private steps, like ``trainer_of``.

    Returns:
        What makes it of the site's plan; None where the agent does it.
    """
    if not uses_ranks(federation.job, file):
        return None
    layout = _checked_layout(federation, file)

    def make(
        private: PrivateTraining | None, statistics: Statistics | None
    ) -> RankedTrainer:
        ranks = ranked_trainer(
            federation.job,
            file,
            layout,
            private,
            statistics=statistics,
            order_seed=federation.order_seed,
        )
        return stack.enter_context(ranks)

    return make


def _checked_layout(federation: Federation, file: SiteFile) -> Layout:
    check_job(federation.job, file, federation.site_data[SiteId(file.name)])
    layout = federation.pool.layout
    if file.compute.sharding == "full":
        check_shardable(layout)
    return layout


@contextmanager
def ranked_trainer(
    job: JobSpec,
    file: SiteFile,
    layout: Layout,
    private: PrivateTraining | None = None,
    *,
    statistics: Statistics | None = None,
    order_seed: int | None = None,
) -> Iterator[RankedTrainer]:
    """Start the site's ranks for a run and end them after it.

    Args:
        job: Trained by all ranks.
        file: The site's configuration.
        layout: Layout of the model.
        private: Plan of private steps; ranks draw their keys themselves.
        statistics: What records are standardised by; None for nothing.
        order_seed: Of the order of examples, below 2^256; the job's seed by default.

    Raises:
        SiteError: No process can be started.
    """
    start = _start(job, file, layout, private)
    if statistics is not None:
        start = replace(start, statistics=json.dumps(statistics.document()))
    if order_seed is not None:
        start = replace(start, seed=f"{order_seed:064x}")
    with ExitStack() as stack:
        variables = environment(file, os.environ)
        if start.compile:
            variables = _compilers_environment(stack) | variables
        memory = SharedModel(layout)
        group = RankGroup(
            MODULE,
            num_ranks=file.compute.ranks,
            environment=variables,
            start=start,
            memory=memory,
        )
        try:
            trainer = RankedTrainer(
                group,
                site=SiteId(file.name),
                layout=layout,
                memory=memory,
                restarts=file.compute.restarts,
            )
        except BaseException:
            memory.close()
            raise
        stack.callback(trainer.close)
        yield trainer


def _start(
    job: JobSpec, file: SiteFile, layout: Layout, private: PrivateTraining | None
) -> Start:
    return Start(
        job=tomli_w.dumps(job_file.document(job)),
        site=file.name,
        data=tomli_w.dumps(
            {"source": file.data.source, "options": dict(file.data.options)}
        ),
        layout=layout.digest,
        timeout_seconds=float(file.compute.timeout_seconds),
        clipping="" if private is None else private.clipping,
        clip_norm=0.0 if private is None else float(private.clip_norm),
        noise_multiplier=0.0 if private is None else float(private.noise_multiplier),
        sharding=file.compute.sharding,
        compile=file.compute.compile and private is None,
    )


def _compilers_environment(stack: ExitStack) -> dict[str, str]:
    """Set a private folder for compiled code; torch's default is shared by users."""
    folder = stack.enter_context(TemporaryDirectory(prefix="crossfed-compiled-"))
    # By threads of the rank: workers of torch's own might outlive it.
    return {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def environment(file: SiteFile, whole: Mapping[str, str]) -> dict[str, str]:
    """Choose the environment variables that a site's ranks see.

    Args:
        file: The site's configuration.
        whole: The agent's own environment.
    """
    patterns = [*_PLAIN, *file.compute.environment]
    if _is_remote(file.data):
        patterns += _CLOUD
    return {
        name: value
        for name, value in whole.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _is_remote(data: LocalDataSpec) -> bool:
    if "://" not in data.source:
        return False
    return parse_url(data.source).is_remote or "encryption_key" in data.options
