"""The verb ``storage`` of the command line: encrypted objects in stores.

Arguments in and text out; the work is in ``deploy.tools.rewrap``.
"""

import argparse
from typing import TYPE_CHECKING

from deploy.cli.arguments import key, service
from deploy.cli.terminal import say, say_json
from deploy.exit_codes import DONE
from federation.errors import JobError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from deploy.tools.rewrap import Place


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
    say(f"{done.rewrapped:>8,}  rewrapped")
    say(f"{done.already:>8,}    already had the key")
    say(f"{done.changed:>8,}    were changed by others meanwhile, and left as they are")
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
        raise JobError("memory:// disappears when this command ends", key="PLACE")
    return rewrap.opened(
        options.place,
        options.root,
        key=key(options),
        service=service(options),
        is_changed=is_changed,
    )


VERBS = {
    "storage rewrap": _rewrap,
    "storage decrypt": _decrypt,
}
