"""A new aggregator's folder: certificates, secrets, an identity, a configuration."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy import audit_log
from deploy.aggregator_host import config as aggregator_file
from deploy.aggregator_host.config import AggregatorFile
from deploy.aggregator_host.service import initialise
from federation.protocols import Clock
from privacy.keystream import RandomBytes
from privacy.membership import key_files as keys, roster_file
from privacy.secret_files import write_new

_AGGREGATOR_TOML = """\
# See docs/howto/two-machines.md. Keys that are left out have their defaults.
listen = "{listen}"
hosts = {hosts}
proxy = {proxy}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAggregator:
    """What others may know of a new aggregator.

    Attributes:
        authority: Fingerprint of its certificate authority.
        identity: Public key of its identity.
    """

    authority: str
    identity: str


def create(
    folder: Path,
    hosts: Sequence[str],
    *,
    listen: str,
    proxy: bool,
    organisation: str,
    random_bytes: RandomBytes,
    clock: Clock,
) -> NewAggregator:
    """Make an aggregator's folder.

    Args:
        folder: Where; nothing in it is overwritten.
        hosts: Names and addresses that sites use for this host, the first one best.
        listen: ``ADDRESS:PORT``.
        proxy: Whether nginx runs in front of the SuperLink.
        organisation: Who operates it.
        random_bytes: ``os.urandom``.
        clock: Tells time.

    Raises:
        JobError: An address or a name is wrong.
        KeyFileRefused: There are keys.
        StoreUnavailable: The folder cannot be made.
    """
    # First: keys are never overwritten, so a mistake must not leave any.
    aggregator_file.check(
        AggregatorFile(listen=listen, hosts=tuple(hosts), proxy=proxy)
    )
    authority = initialise(folder, hosts, clock=clock)
    made = keys.new(
        "aggregator", random_bytes=random_bytes, out=folder / "aggregator.pem"
    )
    roster_file.trust(
        folder / "roster.toml",
        site=None,
        organisation=organisation or hosts[0],
        key=made.public_key,
    )
    text = _AGGREGATOR_TOML.format(
        listen=listen, hosts=json.dumps(list(hosts)), proxy=json.dumps(proxy)
    )
    write_new(folder / "aggregator.toml", text.encode(), mode=0o644)
    about = {"hosts": ", ".join(hosts), "authority": authority.fingerprint}
    audit_log.note(folder, "aggregator.init", at=clock.now(), **about)
    return NewAggregator(authority=authority.fingerprint, identity=made.public_key)
