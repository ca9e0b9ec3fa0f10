"""Verbs of the command line for what a run leaves in stores: model, checkpoints.

Arguments in and text out; the work is in ``deploy.tools.export`` and
``deploy.tools.checkpoints``.
"""

import argparse
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from deploy.cli.arguments import Verbs, add_root
from deploy.cli.store_arguments import (
    KEY_WORDS,
    add_cloud_key,
    add_key,
    add_service,
    key,
    service,
)
from deploy.cli.terminal import say, say_json, tell
from deploy.exit_codes import DONE, FAILED
from federation.errors import JobError

if TYPE_CHECKING:
    from cloud_adapters.urls import StoreOptions
    from federation.protocols import ObjectStore


def add_verbs(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    """Add the verbs to those of the command line."""
    export = verbs.add_parser(
        "export",
        parents=[common],
        help="write a run's model, its card and its job into a store",
    )
    export.add_argument("run", metavar="RUN", help="folder, run id or job name")
    export.add_argument(
        "--to",
        required=True,
        metavar="URL",
        help="where to: file://FOLDER, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
    )
    export.add_argument(
        "--overwrite", action="store_true", help="replace another export there"
    )
    add_service(export)
    add_cloud_key(export)
    add_key(export, f"encrypt it with {KEY_WORDS} (in clear)")
    add_root(export)
    export.set_defaults(verb=_export)

    checkpoints = verbs.add_parser(
        "checkpoints",
        parents=[common],
        help="list the checkpoints of a run, verify them, or remove old ones",
    )
    checkpoints.add_argument(
        "run", metavar="RUN", help="folder, run id, job name, or URL of a run's place"
    )
    checkpoints.add_argument(
        "--verify", action="store_true", help="read every byte and compare digests"
    )
    checkpoints.add_argument(
        "--prune", type=_count, metavar="N", help="keep the newest N, remove the others"
    )
    add_service(checkpoints)
    add_key(checkpoints, "key of an encrypted run that a URL names")
    add_root(checkpoints)
    checkpoints.set_defaults(verb=_checkpoints)


def _export(options: argparse.Namespace) -> int:
    from deploy.tools.export import export  # noqa: PLC0415
    from deploy.wiring.encryption import EXPORT, encrypted_with  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.runs.find import find_run  # noqa: PLC0415

    run = find_run(options.run, options.root)
    lock = key(options)
    with _opened(options.to, service(options), argument="--to") as plain:
        store = encrypted_with(lock, plain, place=EXPORT)
        with contextlib.closing(store):
            done = export(run, store, overwrite=options.overwrite)
    if not lock:
        tell("the export is in clear: --encryption-key encrypts one")
    if options.json:
        say_json({**asdict(done), "encrypted": bool(lock)})
    else:
        say(done.url)
        for name, digest in done.sha256.items():
            say(f"{digest}  {name}")
    return DONE


def _count(text: str) -> int:
    """A number of checkpoints: none at all would leave a run that cannot go on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text!r}")
    return int(text)


def _checkpoints(options: argparse.Namespace) -> int:
    from deploy.tools import checkpoints  # noqa: PLC0415 -- keeps `--help` fast
    from federation.clock import SystemClock  # noqa: PLC0415

    try:
        findings = checkpoints.examine(
            options.run,
            options.root,
            verify=options.verify,
            keep=options.prune,
            clock=SystemClock(),
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
        raise JobError("memory:// ends with this command", key=argument)
    try:
        store = open_store(url, options=service)
    except JobError as error:
        raise JobError(error.reason, key=argument) from error
    try:
        yield store
    finally:
        store.close()
