"""The one object of a site's home that decides: its head, which is also the lease.

Every change of a home is a write of the head on condition that the head is still the
one that the writer knows. So of two machines that believe to be the same site one
fails, whatever their clocks say, and a charge of the former holder cannot succeed after
another has taken over: there is no moment between "is the lease mine?" and "write".

The head carries a *fence*, which rises by one whenever another process becomes the
holder (Gray and Cheriton, Leases, SOSP 1989; the number as in Burrows, Chubby, OSDI
2006, section 2.4), and names the files of the site; see ``folder_copy``.

Time decides only how long a newcomer waits. It takes a lease that was not released
after it has watched the head for longer than the lease lasts, by its own monotonic
clock: what time it is elsewhere does not matter. A holder renews in time, and one that
could not do so stops.
"""

import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from federation.errors import (
    CorruptObject,
    HomeConflict,
    ObjectChanged,
    ObjectExists,
    ObjectNotFound,
    StoreUnavailable,
)
from federation.protocols import Clock, ObjectStore
from federation.typed_json import decode, encode, refuse_constant

KEY = "head"
VERSION = 1
MAX_BYTES = 1 << 26
# A newcomer waits that much longer: quartz clocks differ by far less.
MARGIN = 1.1
# Looks at a head in the time that its lease lasts, at most so far apart.
LOOKS, LOOK_SECONDS = 10, 5.0
_TRIES = 4
_ADVICE = "look for a store that was restored from a copy, or for two sites in one home"

# Waits for so many seconds; returns whether the process is to end.
Wait = Callable[[float], bool]
Admit = Callable[["HomeHead | None"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A part of a file: bytes of an object of the home.

    Attributes:
        pack: Key of the object.
        offset: First byte in it.
        length: Number of bytes.
        sha256: SHA-256 of these bytes.
    """

    pack: str
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the site's folder.

    Attributes:
        path: Below the folder, with slashes.
        pieces: Its content, in order.
    """

    path: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeHead:
    """The contents of a home, and who may change it.

    Attributes:
        version: Version of this format.
        seq: Number of this write, from 1.
        fence: Number of the holder, which only rises.
        changes: How often the files have changed.
        holder: Random name of the holder's process.
        node: Name of its machine, for people.
        lease_seconds: How long the holder may be silent.
        released: Whether it has left.
        renewed_at: Seconds since 1970 by the holder's clock, for people.
        files: Files of the site.
    """

    version: int = VERSION
    site: str
    seq: int
    fence: int
    changes: int
    holder: str
    node: str
    lease_seconds: float
    released: bool
    renewed_at: float
    files: tuple[StoredFile, ...] = ()


def read_head(store: ObjectStore) -> tuple[HomeHead, str] | None:
    """Return the head of a home with its version; None if there is no home yet.

    Raises:
        CorruptObject: It is no head, or one of another release.
        StoreError: It cannot be read.
    """
    for _ in range(_TRIES):
        try:
            info = store.stat(KEY)
            if info.size > MAX_BYTES:
                raise _damaged(store, f"it has {info.size} bytes")
            return _parse(store.read(KEY, if_version=info.version), store), info.version
        except ObjectNotFound:
            return None
        except ObjectChanged as error:  # Between the two requests.
            changed = error
    raise StoreUnavailable(f"{store.url}/{KEY} changes all the time: {_ADVICE}") from (
        changed
    )


def _parse(body: bytes, store: ObjectStore) -> HomeHead:
    try:
        found = json.loads(body, parse_constant=refuse_constant)
        head: HomeHead = decode(found, HomeHead, where=KEY)
    except (ValueError, RecursionError) as error:
        raise _damaged(store, str(error)) from error
    if head.version != VERSION:
        raise _damaged(
            store, f"it has version {head.version}, but this release reads {VERSION}"
        )
    return head


def _damaged(store: ObjectStore, fault: str) -> CorruptObject:
    return CorruptObject(
        f"{store.url}/{KEY} is not the head of a site's home: {fault}; restore the "
        "newest version of the object, or use the release that wrote it"
    )


class HomeLease:
    """A process's hold on a home. Safe to use from several threads.

    Args:
        store: The home's own.
        clock: Its monotonic time decides; the other is only shown.
        site: Name of the site whose home it is.
        node: Name of this machine.
        seconds: How long this process may be silent before another takes over.
    """

    def __init__(
        self, store: ObjectStore, clock: Clock, *, site: str, node: str, seconds: float
    ) -> None:
        """Draw a name for this process; nothing is read yet."""
        self.holder = secrets.token_hex(16)
        self._store = store
        self._clock = clock
        self.seconds = seconds
        self.site, self._node = site, node
        self._lock = threading.RLock()
        self._head: HomeHead | None = None
        self._version = ""
        self._until = 0.0
        self._fault = ""
        # Whether other objects of the home may be gone, too; who stores them resets it.
        self.was_put_back = False

    @property
    def head(self) -> HomeHead:
        """The home, as this process wrote it last.

        Raises:
            HomeConflict: It does not hold the home.
        """
        with self._lock:
            if self._fault or self._head is None:
                raise _conflict(self._fault or "this process does not hold the home")
            return self._head

    def acquire(
        self,
        *,
        wait: Wait,
        listener: Callable[[str], None],
        admit: Admit = lambda _head: None,
        former: str = "",
        take_over: bool = False,
    ) -> HomeHead | None:
        """Become the holder, as soon as there is no other.

        Args:
            wait: Waits between looks.
            listener: Called with a word about whom this process waits for.
            admit: Raises an error for a home that must not be taken.
            former: A holder that is known to have ended.
            take_over: Do not wait: an operator knows that the holder has ended.

        Returns:
            The head that was taken over; None if ``wait`` has ended it. It has fence 0
            if the home is new.

        Raises:
            HomeConflict: The store ignores conditions of writes.
            StoreError: It cannot be read or written.
        """
        watched, since = "", 0.0
        while True:
            found = read_head(self._store)
            before, version = found or (self._empty(), "")
            admit(None if found is None else before)
            now = self._clock.monotonic()
            if version != watched:
                if watched == "" and found is not None and not before.released:
                    listener(_waits_for(before))
                watched, since = version, now
            silent = now - since >= before.lease_seconds * MARGIN
            is_free = before.released or before.holder == former
            if found is None or is_free or silent or take_over:
                if self._take(before, version):
                    return before
                continue
            if wait(min(LOOK_SECONDS, before.lease_seconds / LOOKS)):
                return None

    def write(
        self, files: tuple[StoredFile, ...] | None = None, *, released: bool = False
    ) -> HomeHead:
        """Renew the lease, and replace the files if there are any.

        Args:
            files: Files of the site; None for no change.
            released: Whether this is the last write.

        Raises:
            HomeConflict: Another process holds the home; nothing was written.
            StoreError: It is not known to be written.
        """
        with self._lock:
            for _ in range(_TRIES):
                before = self.head
                after = replace(
                    before,
                    seq=before.seq + 1,
                    changes=before.changes + (files is not None),
                    released=released,
                    renewed_at=self._clock.now(),
                    files=before.files if files is None else files,
                )
                found = self._put(after, self._version)
                if self._head == after:
                    if released:
                        self._fault = "this process has left the site's home"
                    return after
                if found is None or found[0].holder != self.holder:
                    self._fault = _taken_by(None if found is None else found[0])
                    raise _conflict(self._fault)
                # An earlier write of ours has arrived, whose reply was lost, or the
                # store was put back: whichever files are newer count.
                newest = max(before, found[0], key=lambda head: head.changes)
                self.was_put_back |= found[0].changes < before.changes
                self._head = replace(
                    found[0], changes=newest.changes, files=newest.files
                )
                self._version = found[1]
            raise StoreUnavailable(
                f"{self._store.url}/{KEY} changes with every write: {_ADVICE}"
            )

    def check(self) -> None:
        """Require that nobody else can be the holder. Raises like ``write``."""
        with self._lock:
            if self._clock.monotonic() >= self._until:
                self.write()
            _ = self.head

    @property
    def was_acquired(self) -> bool:
        """Whether this process has been the holder at all."""
        with self._lock:
            return self._head is not None

    @property
    def is_over(self) -> bool:
        """Whether it is the holder no longer: it has left, or another took over."""
        with self._lock:
            return bool(self._fault)

    @property
    def seconds_left(self) -> float:
        """How long no other machine takes over, if this one writes nothing more.

        It never waits for a write that is on its way.
        """
        return 0.0 if self._fault else self._until - self._clock.monotonic()

    def lose(self, fault: str) -> None:
        """Hold the home no longer, for a reason."""
        with self._lock:
            self._fault = self._fault or fault

    def _empty(self) -> HomeHead:
        return HomeHead(
            site=self.site,
            seq=0,
            fence=0,
            changes=0,
            holder="",
            node="",
            lease_seconds=self.seconds,
            released=True,
            renewed_at=0.0,
        )

    def _take(self, before: HomeHead, version: str) -> bool:
        taken = replace(
            before,
            seq=before.seq + 1,
            fence=before.fence + 1,
            holder=self.holder,
            node=self._node,
            lease_seconds=self.seconds,
            released=False,
            renewed_at=self._clock.now(),
        )
        with self._lock:
            self._put(taken, version)
            if self._head != taken:
                return False
            self._check_conditions(taken, version)
        return True

    def _check_conditions(self, head: HomeHead, version: str) -> None:
        """Try a write that must fail: a store that ignores conditions has no fence.

        It writes what is there anyway.
        """
        body = _body(head)
        try:
            if version:
                self._store.put(KEY, [body], if_version=version)
            else:
                self._store.put(KEY, [body], if_absent=True)
        except (ObjectChanged, ObjectExists):
            return
        self._fault = f"{self._store.url} ignores conditions of writes"
        raise _conflict(
            f"{self._fault}, so it could not keep two machines apart: use another "
            "service for home.url (crossfed doctor --store tests one)"
        )

    def _put(self, head: HomeHead, version: str) -> tuple[HomeHead, str] | None:
        """Write on condition; keep the head if it is there, else return what is.

        A lost reply leaves open whether the store has carried the write out, so it is
        asked what it holds.
        """
        begin = self._clock.monotonic()
        found: tuple[HomeHead, str] | None
        try:
            if version:
                info = self._store.put(KEY, [_body(head)], if_version=version)
            else:
                info = self._store.put(KEY, [_body(head)], if_absent=True)
            found = head, info.version
        except (ObjectChanged, ObjectExists, StoreUnavailable) as error:
            found = read_head(self._store)
            is_there = found is not None and found[0] == head
            if isinstance(error, StoreUnavailable) and not is_there:
                raise
        if found is not None and found[0] == head:
            self._head, self._version = found
            self._until = begin + head.lease_seconds
        return found


def _body(head: HomeHead) -> bytes:
    body = json.dumps(encode(head), allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise StoreUnavailable(
            f"the head of the home would have {len(body)} bytes, above {MAX_BYTES}: "
            "remove folders of old runs from the site's folder and its home"
        )
    return body


def _waits_for(head: HomeHead) -> str:
    return (
        f"this site runs on {head.node} (fence {head.fence}): waiting until it leaves, "
        f"or has been silent for {head.lease_seconds * MARGIN:.0f} s"
    )


def _taken_by(head: HomeHead | None) -> str:
    if head is None:
        return f"the head of this site's home is gone: {_ADVICE}"
    return f"another process holds this site's home: on {head.node}, fence {head.fence}"


def _conflict(fault: str) -> HomeConflict:
    return HomeConflict(
        f"{fault}; nothing is charged and nothing is trained here",
        outside="this machine no longer runs the site",
    )
