"""Whether a version of Flower is installed that this release supports.

Its private modules carry the messages: another minor version may not understand ours.
"""

import contextlib
import re
from importlib import metadata

from deploy.doctor.checks import Check, ok, problem

INSTALL = "python -m pip install 'crossfed[flower]'"

Version = tuple[int, ...]


def check_flower() -> Check:
    """Check Flower's package, which runs between machines need."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        return problem("flower", "it is not installed", INSTALL)
    limits = None
    with contextlib.suppress(metadata.PackageNotFoundError):
        limits = range_of(metadata.requires("crossfed") or [])
    if limits is not None and not limits[0] <= _numbers(version) < limits[1]:
        low, high = (".".join(map(str, limit)) for limit in limits)
        return problem(
            "flower", f"{version} is not at least {low} and below {high}", INSTALL
        )
    return ok("flower", version)


def range_of(needs: list[str]) -> tuple[Version, Version] | None:
    """The lowest supported version of Flower, and the first unsupported one.

    Args:
        needs: Requirements of a package; None is returned if they do not say.
    """
    for text in needs:
        limits = dict(re.findall(r"(>=|<)\s*([\d.]+)", text.partition(";")[0]))
        if re.match(r"flwr\b", text) and len(limits) == 2:  # noqa: PLR2004
            return _numbers(limits[">="]), _numbers(limits["<"])
    return None


def _numbers(version: str) -> Version:
    """Major and minor; the rest does not matter."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
