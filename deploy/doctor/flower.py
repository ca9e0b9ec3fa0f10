"""Whether Flower is installed here, in the version that this release was made for.

Its private modules carry the messages: another minor version may not understand ours.
"""

import re
from importlib import metadata

from deploy.doctor.checks import Check, ok, problem

INSTALL = "python -m pip install 'crossfed[flower]'"

_PINNED = re.compile(r"flwr(?:\[\w+\])?==([0-9.]+)\.\*")


def check_flower() -> Check:
    """Flower's package, for whoever takes part in runs between machines."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        return problem("flower", "it is not installed", INSTALL)
    pinned = pinned_version()
    if pinned is not None and not f"{version}.".startswith(f"{pinned}."):
        return problem("flower", f"{version} is none of {pinned}", INSTALL)
    return ok("flower", version)


def pinned_version() -> str | None:
    """Flower's minor version that the installed crossfed needs; None if unknown."""
    try:
        found = metadata.requires("crossfed") or []
    except metadata.PackageNotFoundError:
        return None
    matches = (_PINNED.match(text.replace(" ", "")) for text in found)
    return next((match[1] for match in matches if match), None)
