"""Machines that enrol by themselves: their cloud vouches for them, without a person.

A machine repeats what failed for a while, since the aggregator may not expect it yet.
It then waits for a roster that the operator of the sites has signed, and trusts no
other: without that, the aggregator could name whom it likes.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from clients.home.lease import read_head
from deploy.site_host import enrol, enrolment_roster
from deploy.site_host.config import SiteConfig, SiteFile
from deploy.site_host.enrol import Connect, MachineProof, SiteEnrolled
from deploy.site_host.enrolment_connection import NO_ANSWER, Aggregator
from deploy.site_host.home_spec import open_home
from federation.errors import FederationError
from federation.protocols import Clock
from privacy.membership.messages import TOO_EARLY, Prove
from privacy.membership.token import EnrolmentRefused, Token
from privacy.secagg.errors import RosterRefused

PATIENCE_SECONDS = 3600.0
_AGAIN_SECONDS = 3.0
# Who checks the proof may have been away; it is fresh for ten minutes.
_PROVE_AGAIN_SECONDS = 480.0
_LATER = frozenset({NO_ANSWER, TOO_EARLY, 429, 502, 503, 504})

_LOG = logging.getLogger(__name__)


def enroll_machine(
    token: Token,
    folder: Path,
    *,
    organisation: str,
    platform: str,
    prove: Prove,
    clock: Clock,
    connect: Connect = Aggregator,
    patience_seconds: float = PATIENCE_SECONDS,
    listener: Callable[[str], None] = _LOG.info,
) -> SiteEnrolled | None:
    """Make this machine a member, and wait for the roster that it may trust.

    It may be repeated at any time: keys that are in the folder are used, and what is
    done is not done again.

    Args:
        token: Names the aggregator and the site; without a secret.
        folder: Of the site. Its ``site.toml`` may name ``roster_signer``; if there is
            none, or no signer, people compare the roster.
        organisation: Who answers for the site, in words.
        platform: ``aws``, ``gcp`` or ``kubernetes``.
        prove: Makes the cloud's proof of a binding.
        clock: Tells time.
        connect: Opens the connection.
        patience_seconds: How long to try.
        listener: Called with a word about what this waits for.

    Returns:
        What has been enrolled; None if that was done before, here or on the machine
        whose keys are in the site's home.

    Raises:
        EnrolmentRefused: The aggregator refuses for good, or not within that time.
        NotAuthenticated: The cloud gives this machine no identity.
        RosterRefused: No roster was signed within that time.
        JobError: ``site.toml`` is wrong, or of another site.
        StoreError: The site's home cannot be read.
    """
    signer = ""
    if (folder / "site.toml").exists():
        file = enrol.config_of(folder).file
        if file.name != token.site:
            raise EnrolmentRefused(
                f"{folder / 'site.toml'} is of site {file.name!r}, and the token for "
                f"{token.site!r}"
            )
        signer = file.roster_signer
        if file.home.url and _is_kept(file):
            listener(f"{file.home.url} has the keys of this site: crossfed site up")
            return None
    vouched = MachineProof(platform=platform, prove=prove, signer=signer)
    end = clock.monotonic() + patience_seconds

    def once() -> SiteEnrolled:
        return enrol.enroll(
            token,
            folder,
            organisation=organisation,
            clock=clock,
            connect=connect,
            vouched=vouched,
        )

    found = None
    if not enrol.holds_certificate(folder, clock=clock):
        found = _patiently(once, end, clock, listener)
    if signer:
        _await_roster(
            folder, once, end=end, clock=clock, connect=connect, listener=listener
        )
    return found


def _is_kept(file: SiteFile) -> bool:
    """Whether a machine before this one has left the site's keys in its home."""
    with contextlib.closing(open_home(file.home, file.name)) as store:
        found = read_head(store)
    # Without files, that machine ended while it made the home.
    return found is not None and bool(found[0].files)


def refresh(
    config: SiteConfig,
    *,
    clock: Clock,
    listener: Callable[[str], None],
    connect: Connect = Aggregator,
) -> None:
    """Use the newest roster that the operator has signed, if there is another.

    If that fails, the roster that is here stays in use.
    """
    try:
        newest, signature = enrol.signed_roster(config, clock=clock, connect=connect)
        if enrolment_roster.accept_signed(config, newest, signature, at=clock.now()):
            listener(f"roster {newest.serial} is signed by the operator: accepted")
    except FederationError as error:
        listener(f"no newer roster is accepted: {error}")


def _patiently(
    once: Callable[[], SiteEnrolled],
    end: float,
    clock: Clock,
    listener: Callable[[str], None],
) -> SiteEnrolled:
    told = ""
    while True:
        try:
            return once()
        except EnrolmentRefused as error:
            if error.status not in _LATER or clock.monotonic() >= end:
                raise
            if str(error) != told:
                told = str(error)
                listener(f"waiting: {told}")
        clock.sleep(_AGAIN_SECONDS)


def _await_roster(
    folder: Path,
    once: Callable[[], SiteEnrolled],
    *,
    end: float,
    clock: Clock,
    connect: Connect,
    listener: Callable[[str], None],
) -> None:
    """Wait for a signed roster that pins this site."""
    config = enrol.config_of(folder)
    proved, told = clock.monotonic(), ""
    while not config.roster.exists():
        try:
            newest, signature = enrol.signed_roster(
                config, clock=clock, connect=connect
            )
            now = clock.now()
            enrolment_roster.accept_signed(config, newest, signature, at=now)
        except (EnrolmentRefused, RosterRefused) as error:
            is_final = isinstance(error, EnrolmentRefused) and (
                error.status not in _LATER
            )
            if is_final or clock.monotonic() >= end:
                raise
            if str(error) != told:
                told = str(error)
                listener(f"waiting: {told}")
            clock.sleep(_AGAIN_SECONDS)
            if clock.monotonic() - proved > _PROVE_AGAIN_SECONDS:
                proved = clock.monotonic()
                _patiently(once, end, clock, listener)
