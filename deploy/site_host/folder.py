"""A site's folder: one agent or relay at a time, with a fresh certificate."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy.site_host import enrol as enrolment_site
from deploy.site_host.config import RelayLinkSpec, SiteConfig
from federation import folder_lock
from federation.errors import FederationError, JobError
from federation.protocols import Clock
from privacy.secagg.errors import KeyFileRefused
from privacy.secret_files import read_private

RENEWAL_LOOK_SECONDS = 6 * 3600.0


def only_one(folder: Path) -> AbstractContextManager[None]:
    """Lock a site's folder: two agents of one site would conflict.

    Raises:
        FederationError: Another process holds it, when the context is entered.
    """
    return folder_lock.hold(
        folder / "agent.lock",
        f"another agent or relay is running in {folder}: stop it, or give this site "
        "its own folder",
    )


def note_contact(folder: Path) -> None:
    """Note that the aggregator has answered just now: see ``last_contact``."""
    with contextlib.suppress(OSError):  # A full disk stops nobody's work.
        (folder / "contact").touch()


def last_contact(folder: Path) -> float | None:
    """When the aggregator, or the site's relay, answered last: seconds since 1970."""
    try:
        return (folder / "contact").stat().st_mtime
    except OSError:
        return None


@contextlib.contextmanager
def noting_end(folder: Path) -> Iterator[None]:
    """Note which error ends the agent: see ``last_end``."""
    try:
        yield
    except FederationError as error:
        with contextlib.suppress(OSError):  # It is in the log, too.
            (folder / "ended").write_text(str(error), encoding="utf-8")
        raise


def last_end(folder: Path) -> tuple[str, float] | None:
    """Why an agent ended by itself, and when; None if the aggregator answered since."""
    try:
        at = (folder / "ended").stat().st_mtime
        reason = (folder / "ended").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return (reason, at) if at >= (last_contact(folder) or 0.0) else None


def node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the key that Flower knows a site by.

    Raises:
        KeyFileRefused: It is missing, open to others or damaged.
    """
    try:
        key = serialization.load_pem_private_key(read_private(path), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeyFileRefused(f"{path} is not a node key: enrol this site again")
    return key


def authority(config: SiteConfig) -> bytes:
    """Read the certificate of the authority that a site pins; PEM.

    Raises:
        JobError: It cannot be read.
    """
    try:
        return config.authority.read_bytes()
    except OSError as error:
        raise JobError(
            f"cannot read {config.authority}: {error.strerror}",
            key="aggregator.authority",
        ) from error


def relay_authority(config: SiteConfig, relay: RelayLinkSpec) -> bytes:
    """Read the certificate of the authority of a site's relay; PEM.

    Raises:
        JobError: It cannot be read, or this site has no certificate to show.
    """
    if config.certificate is None:
        raise JobError(
            "is empty: a relay admits only sites with a certificate, so enrol this "
            "site",
            key="certificate",
        )
    path = config.folder / relay.authority
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(
            f"cannot read {path}: {error.strerror}; copy relay/ca.crt of the relay's "
            "folder to it",
            key="relay.authority",
        ) from error


def keep_fresh(
    config: SiteConfig,
    clock: Clock,
    stopped: threading.Event,
    listener: Callable[[str], None],
) -> None:
    """Renew the site's certificate when it is due, in a separate thread."""
    threading.Thread(
        target=_renew, args=(config, clock, stopped, listener), daemon=True
    ).start()


def _renew(
    config: SiteConfig,
    clock: Clock,
    stopped: threading.Event,
    listener: Callable[[str], None],
) -> None:
    while True:
        try:
            found = enrolment_site.renew_when_due(config, clock=clock)
        except FederationError as error:
            listener(f"the certificate could not be renewed: {error}")
        else:
            if found is not None:
                listener("the certificate was renewed")
        if stopped.wait(RENEWAL_LOOK_SECONDS):
            return
