"""Whether a site's home can keep two machines apart, and which one runs the site."""

import contextlib
from collections.abc import Iterator

from clients.home.lease import HomeHead, read_head
from cloud_adapters.storage.probe import check_conditions_kept
from deploy.doctor.checks import Check, ok, problem
from deploy.site_host.config import SiteConfig
from deploy.site_host.home_spec import open_home
from federation.errors import FederationError

_NAME = "home"


def checks(config: SiteConfig) -> Iterator[Check]:
    """Read the home's head, and try what a lease depends on.

    Args:
        config: The site's.
    """
    spec = config.file.home
    if not spec.url:
        yield ok(_NAME, "none: this disk has the only copy of keys and ledgers")
        return
    try:
        with contextlib.closing(open_home(spec, config.file.name)) as store:
            found = read_head(store)
            check_conditions_kept(store)
    except FederationError as error:
        advice = "correct [home], or this machine's permissions there"
        yield problem(_NAME, f"{spec.url}: {error}", advice)
        return
    yield ok(_NAME, f"{spec.url}: {_state(None if found is None else found[0])}")


def is_elsewhere(config: SiteConfig) -> bool:
    """Whether the folder has no keys, and the home does."""
    if not config.file.home.url or config.identity.exists():
        return False
    try:
        with contextlib.closing(open_home(config.file.home, config.file.name)) as store:
            return read_head(store) is not None
    except FederationError:  # The check before has said so.
        return False


def _state(head: HomeHead | None) -> str:
    if head is None:
        return "empty until the agent is started"
    holds = "was last held by" if head.released else "is held by"
    return (
        f"it {holds} {head.node} (fence {head.fence}, change {head.changes}), "
        f"{len(head.files)} files"
    )
