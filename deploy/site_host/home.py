"""A site's process and its home: enter it first, renew the lease, release it."""

import contextlib
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from clients.home.folder_copy import FolderCopy, is_state
from clients.home.home import Home, is_current
from clients.home.lease import HomeLease, read_head
from deploy import audit_log
from deploy.site_host.config import SiteConfig
from deploy.site_host.departure import Departure
from deploy.site_host.home_spec import is_inside, open_home
from deploy.site_host.run import LedgerKey
from federation.errors import (
    FederationError,
    HomeConflict,
    StoreError,
    StoreUnavailable,
    os_errors,
)
from federation.messages import LeaveReason
from federation.protocols import Clock, ObjectStore
from privacy import own_folder
from privacy.secagg.agreement import identity

# Renewals in the time of a lease: two may fail.
_RENEWALS = 4
_LOOK_SECONDS = 0.1
# Less than ``graceful_exit`` waits.
_FAREWELL_SECONDS = 1.0

Listener = Callable[[str], None]


@contextlib.contextmanager
def entered(
    config: SiteConfig,
    *,
    departure: Departure,
    clock: Clock,
    listener: Listener,
    take_over: bool = False,
) -> Iterator[SiteConfig | None]:
    """Hold the site's home during a block; do nothing if it has none.

    The folder must be locked. At the end the home is released, so that another machine
    need not wait; if it was lost meanwhile, that is the error.

    Args:
        config: The operator's ``site.toml``.
        departure: Ends waiting; and is ended when the home is lost.
        clock: Tells time.
        listener: Called with a word about what happens.
        take_over: Do not wait for the present holder, which has ended.

    Yields:
        The configuration whose ``confirm`` writes the home; None if the site is to
        leave before it holds the home.

    Raises:
        HomeConflict: The home cannot be entered, or another machine has taken over.
        FederationError: See ``Home.enter``.
    """
    if not config.file.home.url:
        yield config
        return
    with contextlib.closing(open_home(config.file.home, config.file.name)) as store:
        home = _home(config, store=store, clock=clock, listener=listener)
        departure.is_replaced = lambda: home.lease.seconds_left <= 0
        with _renewed(home, departure, listener):
            is_held = home.enter(
                wait=departure.stopped.wait,
                head_key=lambda: LedgerKey(identity.load(config.identity)),
                take_over=take_over,
            )
            yield replace(config, confirm=home.confirm) if is_held else None


@contextlib.contextmanager
def _renewed(home: Home, departure: Departure, listener: Listener) -> Iterator[None]:
    """Renew the lease during a block, and release it at the end.

    Raises:
        HomeConflict: It was lost.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_renew, args=(home, departure, ended, listener), name="home", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if departure.lost:
        raise HomeConflict(departure.lost)


def _renew(
    home: Home, departure: Departure, ended: threading.Event, listener: Listener
) -> None:
    """Write the head again and again; a lease that is lost ends the process."""
    while not ended.is_set() and not departure.stopped.is_set():
        try:
            home.renew()
        except HomeConflict as error:
            departure.lose(str(error), LeaveReason.SIGTERM)
        except StoreError as error:
            left = max(0.0, home.lease.seconds_left)
            listener(f"the home was not renewed, {left:.0f} s left: {error}")
        # By the clock, so that a frozen process finds out when it runs again.
        due = home.clock.monotonic() + home.lease.seconds / _RENEWALS
        while home.clock.monotonic() < due and not ended.is_set():
            if departure.stopped.wait(_LOOK_SECONDS):
                break
    if not departure.lost:
        departure.await_kept()
        # Until the aggregator knows: it lets no other in before, and a node whose home
        # is released does not take leave.
        ended.wait(_FAREWELL_SECONDS)
    # Then immediately: a process that is to end may be ended within a second.
    try:
        home.release()
    except FederationError as error:
        listener(f"the home was not released, so the next machine waits: {error}")


@contextlib.contextmanager
def newest(config: SiteConfig, listener: Listener) -> Iterator[SiteConfig]:
    """Find the newest copy of what a site has spent, to be read only.

    Without a home, or where the folder is what the home describes, that is the folder;
    else a copy of the home's ledgers, memory and identity for the time of the block.

    Args:
        config: The operator's ``site.toml``.
        listener: Called with a word about where it is read.

    Raises:
        StoreError: The home cannot be read.
    """
    if not config.file.home.url:
        yield config
        return
    with os_errors(StoreUnavailable, f"make {config.folder}"):
        own_folder.make(config.folder)
    with (
        contextlib.closing(open_home(config.file.home, config.file.name)) as store,
        # Beside the keys, of which it has a copy: closed to others, and on this disk.
        tempfile.TemporaryDirectory(prefix=".home-", dir=config.folder) as name,
    ):
        found = read_head(store)
        if found is None or is_current(config.folder, store.url, found[0]):
            yield config
            return
        head, folder = found[0], Path(name)
        listener(
            f"read from {store.url}, which {head.node} wrote last (fence {head.fence})"
        )
        wanted = [
            file
            for file in head.files
            if file.path == config.file.identity
            or (file.path.startswith(("memory/", "runs/")) and not is_state(file.path))
        ]
        copy = FolderCopy(folder=folder, store=store, names=names_of(config))
        copy.restore(wanted)
        path = folder / config.file.identity
        yield replace(config, folder=folder, identity=path)


def names_of(config: SiteConfig) -> tuple[str, ...]:
    """The files at the top of a site's folder that its home keeps."""
    file = config.file
    named = (
        file.identity,
        file.node_key,
        file.certificate,
        file.roster,
        file.aggregator.authority,
        audit_log.FILE,
    )
    return tuple(name for name in named if is_inside(name))


def _home(
    config: SiteConfig, *, store: ObjectStore, clock: Clock, listener: Listener
) -> Home:
    file = config.file
    lease = HomeLease(
        store,
        clock,
        site=file.name,
        node=platform.node(),
        seconds=file.home.lease_seconds,
    )
    copy = FolderCopy(folder=config.folder, store=store, names=names_of(config))
    return Home(copy, lease, identity=file.identity, clock=clock, listener=listener)
