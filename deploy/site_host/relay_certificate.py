"""The certificate of a relay's own server, by an authority in its folder."""

import ssl
import threading
from pathlib import Path

from federation.errors import FederationError
from federation.protocols import Clock
from privacy.membership.certificates import Authority, key_pem, new_key
from privacy.secret_files import replace_private

# As long as half of what a certificate of a server holds for.
CERTIFY_SECONDS = 45 * 86_400.0


def prepare(
    folder: Path, hosts: tuple[str, ...], context: ssl.SSLContext, clock: Clock
) -> None:
    """Make the authority, if there is none, and certify the server.

    Args:
        folder: Holds the authority; clients pin its ``ca.crt``.
        hosts: Names and addresses of the server.
        context: Serves with the certificate, for connections from now on.
        clock: Tells time.

    Raises:
        KeyFileRefused: A key file is open to others or damaged.
        FederationError: The folder cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (folder / "ca.key").exists():
            Authority.create("crossfed relay", clock=clock).save(folder)
        certify(folder, hosts, context, clock)
    except OSError as error:
        raise FederationError(
            f"cannot write below {folder}: {error.strerror}"
        ) from error


def certify(
    folder: Path, hosts: tuple[str, ...], context: ssl.SSLContext, clock: Clock
) -> None:
    """Give the server a fresh certificate; see ``prepare``."""
    key, path = new_key(), folder / "server.pem"
    issued = Authority.load(folder, clock=clock).issue_server(hosts, key)
    replace_private(path, issued + key_pem(key))
    context.load_cert_chain(path)


def keep_certified(
    folder: Path,
    hosts: tuple[str, ...],
    context: ssl.SSLContext,
    clock: Clock,
    stopped: threading.Event,
) -> None:
    """Certify the server again whenever it is due, until ``stopped`` is set."""
    while not stopped.wait(CERTIFY_SECONDS):
        certify(folder, hosts, context, clock)
