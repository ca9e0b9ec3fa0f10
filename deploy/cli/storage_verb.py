"""The verb ``storage`` of the command line: what lies encrypted in stores.

Arguments in and text out; the work is in ``deploy.tools.rewrap``.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.cli.arguments import Verbs, add_root
from deploy.cli.store_arguments import KEY_WORDS, add_key, add_service, key, service
from deploy.cli.terminal import say, say_json
from deploy.exit_codes import DONE
from federation.errors import JobError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from deploy.tools.rewrap import Place


def add_verb(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    """Add the verb to those of the command line."""
    storage = verbs.add_parser("storage", help="look after what is encrypted in stores")
    inner = storage.add_subparsers(required=True, metavar="VERB")
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument(
        "place",
        metavar="PLACE",
        help="folder, run id or job name; or URL of a run's place, dataset or export",
    )
    add_key(place, f"its key, {KEY_WORDS} (the job's, of a run)")
    add_service(place)
    add_root(place)

    rewrap = inner.add_parser(
        "rewrap",
        parents=[place, common],
        help="wrap all data keys with the newest key, or with another one",
    )
    rewrap.add_argument(
        "--to", default="", metavar="KEY", help="another key (the newest of the same)"
    )
    rewrap.add_argument(
        "--to-endpoint", default="", metavar="URL", help="of the other key's service"
    )
    rewrap.set_defaults(verb=_rewrap)

    decrypt = inner.add_parser(
        "decrypt",
        parents=[place, common],
        help="write the contents into a folder, in clear",
    )
    decrypt.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the folder"
    )
    decrypt.set_defaults(verb=_decrypt)


def _rewrap(options: argparse.Namespace) -> int:
    from deploy.tools import rewrap  # noqa: PLC0415 -- imports torch
    from deploy.wiring.encryption import KeyName  # noqa: PLC0415

    to = KeyName(name=options.to, endpoint=options.to_endpoint, argument="--to")
    with _opened(options, is_changed=True) as place:
        done = rewrap.rewrap(place, to=to)
    if options.json:
        say_json(rewrap.facts(done))
        return DONE
    say(done.url)
    say(f"{done.rewrapped:>8,}  wrapped anew")
    say(f"{done.already:>8,}  had the key already")
    say(f"{done.changed:>8,}  changed meanwhile, and are as others wrote them")
    say(f"{done.in_clear:>8,}  are not encrypted")
    return DONE


def _decrypt(options: argparse.Namespace) -> int:
    from deploy.tools import rewrap  # noqa: PLC0415 -- imports torch

    with _opened(options, is_changed=False) as place:
        written = rewrap.decrypt(place, options.out)
    if options.json:
        say_json({"folder": str(options.out), "bytes": written})
    else:
        for name, size in written.items():
            say(f"{size:>12,}  {options.out / name}")
    return DONE


def _opened(
    options: argparse.Namespace, *, is_changed: bool
) -> "AbstractContextManager[Place]":
    from deploy.tools import rewrap  # noqa: PLC0415 -- imports torch

    if options.place == "memory://":
        raise JobError("memory:// ends with this command", key="PLACE")
    return rewrap.opened(
        options.place,
        options.root,
        key=key(options),
        service=service(options),
        is_changed=is_changed,
    )
