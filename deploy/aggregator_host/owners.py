"""Who may have runs at an aggregator: with which share of the sites, and how much.

One file, ``owners.json``, only for the aggregator's user. Of tokens it holds SHA-256:
they have 256 random bits, so that no slow hash is needed.
"""

import hmac
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.storage.disk.part_file import file_errors
from deploy.aggregator_host.run_queue import OPERATOR
from federation import durable_files, folder_lock
from federation.errors import JobError
from federation.ids import check_name
from federation.job.spec import JobSpec
from federation.typed_json import encode
from privacy.membership.token import digest_of
from privacy.secret_files import replace_private

FILE = "owners.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an owner's runs have used, or may use.

    Attributes:
        site_hours: Hours that sites were held, added up over sites.
        gigabytes: Sent and received by the aggregator, in 10^9 bytes.
        epsilon: The largest of any site, added up over runs.
        dollars: Of machines and traffic, as ``federation.rounds.cost`` counts them. In
            what was used None if a price is not known.
    """

    site_hours: float | None = None
    gigabytes: float | None = None
    epsilon: float | None = None
    dollars: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """An owner of runs.

    Attributes:
        weight: Its share of the sites against those of the other owners.
        max_priority: The highest that its runs may have.
        quota: What all its runs together may use.
        token: SHA-256 of its token's secret; empty if it was revoked.
    """

    name: str
    weight: float = 1.0
    max_priority: int = 0
    quota: Usage = Usage()
    token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """All owners, in the order of their names."""

    owners: tuple[Owner, ...] = ()

    def find(self, name: str) -> Owner | None:
        """Return an owner; the operator always is one, of any priority."""
        known = next((one for one in self.owners if one.name == name), None)
        if known is None and name == OPERATOR:
            return Owner(name=OPERATOR, max_priority=MAX_PRIORITY)
        return known

    def of_secret(self, secret: bytes) -> Owner | None:
        """Return whose token it is: every owner is compared, in constant time."""
        digest, found = digest_of(secret), None
        for one in self.owners:
            if hmac.compare_digest(one.token.rjust(len(digest)), digest):
                found = one
        return found


MAX_PRIORITY = 100


def read(folder: Path) -> Owners:
    """Read the owners of an aggregator.

    Raises:
        CorruptObject: The file cannot be read, or is damaged.
    """
    advice = "restore it from a backup, or remove it and add all owners again"
    found = durable_files.read_json(folder / FILE, Owners, advice=advice)
    return Owners() if found is None else found


def change(folder: Path, name: str, of: Callable[[Owner | None], Owner]) -> Owner:
    """Add an owner, or replace what is known of one.

    Args:
        folder: The aggregator's.
        name: Who.
        of: From what is known of the owner to what is to be.

    Raises:
        StoreUnavailable: The file cannot be written.
        CorruptObject: It is damaged.
    """
    path = folder / FILE
    with file_errors("write", path), folder_lock.waited_for(folder / "owners.lock"):
        before = {one.name: one for one in read(folder).owners}
        after = of(before.get(name))
        known = before | {name: after}
        owners = Owners(owners=tuple(one for _, one in sorted(known.items())))
        replace_private(path, json.dumps(encode(owners), allow_nan=False).encode())
    return after


def check_settings(
    name: str, *, weight: float = 1.0, max_priority: int = 0, quota: Usage = Usage()
) -> None:
    """Refuse an owner that cannot be.

    Raises:
        JobError: The message names the key.
    """
    for what in _UNITS:
        if getattr(quota, what) == 0:
            raise JobError(f"no job fits {what}=0: revoke the owner", key="--quota")
    try:
        check_name(name)
    except ValueError as error:
        raise JobError(str(error), key="name") from None
    if name == OPERATOR:
        raise JobError(
            f"{OPERATOR!r} is whoever works on this host: choose another", key="name"
        )
    if not 0 < weight < math.inf:
        raise JobError("must be a finite number above 0", key="--weight")
    if not 0 <= max_priority <= MAX_PRIORITY:
        raise JobError(f"must be from 0 to {MAX_PRIORITY}", key="--max-priority")


def exceeded(owner: Owner, used: Usage) -> str:
    """Say which of its quotas an owner has used up; empty if none."""
    for what, unit in _UNITS.items():
        limit, value = getattr(owner.quota, what), getattr(used, what)
        if limit is not None and value is None:
            return (
                f"owner {owner.name!r} has a quota of {unit}, and they cannot be "
                "counted: queue.prices in aggregator.toml must name a file with the "
                "prices of every site"
            )
        if limit is not None and value >= limit:
            return (
                f"owner {owner.name!r} has used {value:.4g} of {limit:g} {unit} "
                f"(quota {what})"
            )
    return ""


def check_submission(
    owner: Owner | None, name: str, priority: int, used: Usage
) -> Owner:
    """Refuse a run that its owner may not have; return the owner.

    Args:
        owner: As it is known; None if it is not.
        name: As it was asked for.
        priority: That of the run.
        used: By all runs of the owner.

    Raises:
        JobError: The message names the key or quota.
    """
    if owner is None:
        raise JobError(
            f"there is no owner {name!r}: see crossfed aggregator owners list",
            key="--owner",
        )
    if not 0 <= priority <= owner.max_priority:
        most = owner.max_priority
        allowed = f"priorities from 0 to {most}" if most else "priority 0 alone"
        raise JobError(f"owner {name!r} may ask for {allowed}", key="--priority")
    if fault := exceeded(owner, used):
        raise JobError(fault, key="--owner")
    return owner


def check_epsilon(owner: Owner, job: JobSpec, used: Usage, reserved: float) -> None:
    """Refuse a job that its owner's quota of epsilon has no room for.

    Args:
        owner: Whose job it is.
        job: What is to be run.
        used: By all runs of the owner.
        reserved: Epsilon that those of them may still spend that have not ended.

    Raises:
        JobError: It does not fit.
    """
    private, limit = job.privacy.differential_privacy, owner.quota.epsilon
    if not private.enabled or limit is None:
        return
    spent = used.epsilon or 0.0
    if spent + reserved + (private.target_epsilon or 0.0) > limit:
        open_runs = f", and its open runs may spend {reserved:.4g}" if reserved else ""
        raise JobError(
            f"owner {owner.name!r} has used epsilon {spent:.4g} of {limit:g}"
            f"{open_runs} (quota epsilon): no run with this target fits",
            key="privacy.differential_privacy.target_epsilon",
        )


_UNITS: Mapping[str, str] = {
    "site_hours": "site-hours",
    "gigabytes": "GB",
    "epsilon": "epsilon",
    "dollars": "dollars",
}
