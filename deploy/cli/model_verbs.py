"""Verbs of the command line for a run's results: model, checkpoints, metrics.

Arguments in and text out; the work is in ``deploy.tools`` and
``monitoring.runs.trackers``.
"""

import argparse
import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deploy.cli.arguments import key, service, source_options
from deploy.cli.terminal import say, say_json, tell
from deploy.exit_codes import DONE, FAILED
from federation.errors import JobError

if TYPE_CHECKING:
    from cloud_adapters.urls import StoreOptions
    from federation.protocols import ObjectStore
    from monitoring.runs.run_folder import RunFolder


_PUBLIC_KEY = re.compile(r"[0-9a-fA-F]{64}")


def _export(options: argparse.Namespace) -> int:
    from deploy.tools.export import export  # noqa: PLC0415
    from deploy.wiring.encryption import EXPORT, encrypted_with  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.runs.find import find_run  # noqa: PLC0415

    run = find_run(options.run, options.root)
    data = None
    if options.data:
        from deploy.tools.predict import source_of  # noqa: PLC0415

        data = source_of(run, options.data, source_options(options.option))[1]
    signer = None
    if options.sign is not None:
        from privacy.membership.key_files import open_key  # noqa: PLC0415

        signer = open_key(options.sign, passphrase_file=options.passphrase_file)
    lock = key(options)
    with (
        _model_of(run, options.site) as model,
        _opened(options.to, service(options), argument="--to") as plain,
    ):
        store = encrypted_with(lock, plain, place=EXPORT)
        with contextlib.closing(store):
            done = export(
                run,
                store,
                overwrite=options.overwrite,
                kind=options.format,
                data=data,
                signer=signer,
                model=model,
                site=options.site,
            )
    if not lock:
        tell("the export is not encrypted: use --encryption-key to encrypt it")
    if options.json:
        say_json({**asdict(done), "encrypted": bool(lock)})
    else:
        say(done.url)
        for name, digest in done.sha256.items():
            say(f"{digest}  {name}")
    if done.parity and not options.json:
        tell(f"outputs compared with the run's model: {done.parity}")
    return DONE


def _verify(options: argparse.Namespace) -> int:
    from deploy.tools.export_signature import verify  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.wiring.encryption import EXPORT, encrypted_with  # noqa: PLC0415

    if not _PUBLIC_KEY.fullmatch(options.key):
        raise JobError("must have 64 hexadecimal digits", key="--key")
    with _opened(options.url, service(options), argument="URL") as plain:
        store = encrypted_with(key(options), plain, place=EXPORT)
        with contextlib.closing(store):
            found = verify(store, options.key.lower())
    if options.json:
        say_json(asdict(found))
        return DONE
    for name, digest in found.sha256.items():
        say(f"{digest}  {name}")
    say(f"signed with {found.public_key}, of run {found.run_id}")
    return DONE


def _prune(options: argparse.Namespace) -> int:
    from deploy.tools.prune import prune  # noqa: PLC0415 -- imports torch
    from monitoring.runs.find import find_run  # noqa: PLC0415

    run = find_run(options.run, options.root)
    done = prune(run, options.fraction, kind=options.by, out=options.out)
    if options.json:
        say_json(asdict(done))
        return DONE
    for layer in done.layers:
        say(f"{layer.zeros:>12,} of {layer.weights:>12,}  {layer.layer}")
    say(f"{done.path}: set model.weights to it, and model.keep_zeros = true")
    return DONE


def _predict(options: argparse.Namespace) -> int:
    from deploy.tools.predict import predict  # noqa: PLC0415 -- imports torch
    from monitoring.runs.find import find_model  # noqa: PLC0415

    done = predict(
        find_model(options.run, options.root),
        options.data,
        source_options(options.option),
        out=options.out,
        split=options.split,
    )
    if options.json:
        say_json(asdict(done))
        return DONE
    for name, value in done.metrics.items():
        say(f"{name:<11} {value:.4f}")
    say(f"{done.records} predictions are in {done.path}")
    return DONE


@contextmanager
def _model_of(run: "RunFolder", site: str) -> Iterator[Path | None]:
    """The file of a site's own model, for as long as the block lasts."""
    if not site:
        yield None
        return
    from deploy.tools.site_model import write_site_model  # noqa: PLC0415 -- keeps `--help` fast

    with TemporaryDirectory(prefix="crossfed-site-model-") as folder:
        path = Path(folder) / "model.safetensors"
        write_site_model(run, site, path)
        yield path


def _export_metrics(options: argparse.Namespace) -> int:
    from monitoring.runs import trackers  # noqa: PLC0415 -- as above
    from monitoring.runs.find import find_run  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.web import traces  # noqa: PLC0415 -- as above

    run, follow, clock = (
        find_run(options.run, options.root),
        options.follow,
        options.clock,
    )
    if options.to == "otlp":
        points = traces.export_traces(run, follow=follow, clock=clock)
    else:
        points = trackers.export_metrics(
            run, options.to, follow=follow, clock=clock, tell=tell
        )
    if options.json:
        say_json({"run": str(run.path), "to": options.to, "points": points})
    else:
        what = "traces" if options.to == "otlp" else "points"
        say(f"{points} {what} of {run.path} are in {options.to}")
    return DONE


def _checkpoints(options: argparse.Namespace) -> int:
    from deploy.tools import checkpoints  # noqa: PLC0415 -- keeps `--help` fast

    try:
        findings = checkpoints.examine(
            options.run,
            options.root,
            verify=options.verify,
            keep=options.prune,
            clock=options.clock,
            encryption=key(options),
            service=service(options),
        )
    except JobError as error:
        if "://" not in options.run:
            raise
        # The URL is not of a job here.
        raise JobError(error.reason, key="RUN") from error
    if options.json:
        say_json(checkpoints.facts(findings))
    else:
        for line in checkpoints.lines(findings):
            say(line)
    return FAILED if findings.num_damaged else DONE


@contextmanager
def _opened(
    url: str, service: "StoreOptions", *, argument: str
) -> Iterator["ObjectStore"]:
    """Open the store that an argument names.

    Raises:
        JobError: It names none, or one that ends with this command.
    """
    from cloud_adapters.urls import open_store  # noqa: PLC0415 -- keeps `--help` fast

    if url == "memory://":
        raise JobError("memory:// disappears when this command ends", key=argument)
    try:
        store = open_store(url, options=service)
    except JobError as error:
        raise JobError(error.reason, key=argument) from error
    try:
        yield store
    finally:
        store.close()


VERBS = {
    "predict": _predict,
    "verify": _verify,
    "prune": _prune,
    "export": _export,
    "export-metrics": _export_metrics,
    "checkpoints": _checkpoints,
}
