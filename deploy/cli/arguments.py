"""What arguments that several verbs take name: jobs, deployments and stores."""

import argparse
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from federation.errors import JobError

if TYPE_CHECKING:
    from cloud_adapters.urls import StoreOptions
    from deploy.fleet.spec import DeploymentPlan
    from deploy.wiring.encryption import KeyName
    from federation.job.spec import JobSpec


def load_job(options: argparse.Namespace) -> "JobSpec":
    """Read the job that the arguments ``job`` of ``verbs.toml`` name.

    Raises:
        JobError: It cannot be read, or is not one that can be run.
        StoreError: ``model.weights`` is in a bucket that cannot be read.
    """
    from federation.job import job_file  # noqa: PLC0415 -- keeps `--help` fast

    overrides = list(options.set)
    if options.seed is not None:
        overrides.append(f"seed={options.seed}")
    if getattr(options, "extend", None) is not None:
        overrides.append(f"rounds={options.extend}")
    model = _evaluated(options)
    job = job_file.load(options.job, overrides, evaluated=model)
    if job.training.standardise:
        from deploy.wiring.statistics_moments import with_moments  # noqa: PLC0415 -- keeps `--help` fast

        job = with_moments(job)
    if model and "://" not in model:
        from deploy.wiring.statistics_moments import check_alike  # noqa: PLC0415 -- as above

        check_alike(job, model)
    if job.model.weights is None:
        return job
    from clients.models.starting_weights import pinned  # noqa: PLC0415 -- imports torch

    return pinned(job, options.job.parent)


def _evaluated(options: argparse.Namespace) -> str:
    """The model that sites evaluate: a path or a URL; empty for none."""
    model: str = getattr(options, "evaluate", "") or getattr(options, "model", "")
    if not model or "://" in model:
        return model
    path = Path(model)
    if not path.exists():
        from monitoring.runs.find import LOCAL_ROOT, find_run  # noqa: PLC0415 -- as above

        path = find_run(model, getattr(options, "root", LOCAL_ROOT)).path
    return str(path.absolute())


def load_plan(options: argparse.Namespace) -> "DeploymentPlan":
    """Read the deployment file, or its rehearsal on this host if that is asked for.

    Raises:
        JobError: It cannot be read, or a key is wrong.
    """
    from deploy.fleet import spec  # noqa: PLC0415 -- --help

    plan = spec.load(options.deployment)
    return spec.on_this_host(plan) if options.provider else plan


def service(options: argparse.Namespace) -> "StoreOptions":
    """What the arguments ``service`` and ``cloud_key`` of ``verbs.toml`` say."""
    from cloud_adapters.urls import StoreOptions  # noqa: PLC0415 -- keeps `--help` fast

    return StoreOptions(
        endpoint=options.endpoint,
        region=options.region,
        bucket_owner=options.bucket_owner,
        kms_key=getattr(options, "kms_key", ""),
    )


def key(options: argparse.Namespace) -> "KeyName":
    """What ``--encryption-key`` and ``--encryption-endpoint`` say."""
    from deploy.wiring.encryption import KeyName  # noqa: PLC0415 -- keeps `--help` fast

    return KeyName(name=options.encryption_key, endpoint=options.encryption_endpoint)


def source_options(texts: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE as in a job; a value that is not TOML is a string."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier():
            raise JobError(f"{text!r} is not KEY=VALUE", key="--option")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found
