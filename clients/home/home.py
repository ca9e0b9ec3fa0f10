"""A site's home: the folder of this machine and its copy in a store, as one.

The order of everything that a site promises is

1. write it to the folder and flush it, as without a home,
2. store the pieces that have changed, and write the head on condition (``confirm``),
3. only now train with it, or let an answer leave.

A process that is no longer the holder fails at 2, so that nothing of it is trained and
nothing leaves. What it wrote at 1 has released nothing.

On a new machine the store is copied to the folder. On a machine whose own process was
the holder, and whose files the head still describes, the folder is at least as new
as the store, and what is more is stored. In any other folder, or if a ledger lacks
what the store's has, the store's files replace
those that are there; charges that only the folder knows are made again
although nothing was released for them.

Such a charge was written here and never confirmed. It counts all the same: the folder
may be of a machine that was put back or paused, and a charge too many is the error that
protects records.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from clients.home.folder_copy import FolderCopy, is_state
from clients.home.lease import HomeHead, HomeLease, StoredFile, Wait
from federation import durable_files
from federation.errors import (
    CorruptObject,
    HomeConflict,
    JobError,
    StoreError,
    StoreUnavailable,
    os_errors,
)
from federation.protocols import Clock
from privacy.dp.ledger import ledger_files, ledger_format
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_files import LEDGER_NAME, HeadKey
from privacy.dp.ledger.ledger_format import Contents
from privacy.secret_files import replace_private


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCharges:
    """A file of a folder, before the home's replaced it.

    Attributes:
        path: Where.
        contents: Contents of a ledger; None if it is a number of a round.
        answered: The round.
    """

    path: Path
    contents: Contents | None = None
    answered: int = 0


def charges_below(folder: Path) -> list[LocalCharges]:
    """Read every ledger and round number in a site's folder.

    Raises:
        LedgerDamaged: A ledger cannot be read, so what it has charged is not known.
        StoreUnavailable: A file cannot be read.
    """
    found = []
    for path in sorted((folder / "runs").glob(f"*/sites/*/{LEDGER_NAME}")):
        with os_errors(StoreUnavailable, f"read {path}"):
            data = ledger_files.read_all(path)
        if b"\n" in data:
            contents = ledger_format.read(data, str(path))
            found.append(LocalCharges(path=path, contents=contents))
    for path in sorted((folder / "runs").glob("*/sites/*/rounds/*.round")):
        with contextlib.suppress(ValueError):  # Then the home's replaces it.
            found.append(LocalCharges(path=path, answered=int(path.read_text("ascii"))))
    return found


def charge_again(
    before: list[LocalCharges], *, clock: Clock, head_key: Callable[[], HeadKey]
) -> Iterator[str]:
    """Add to the home's files what only the folder's had; describe each addition.

    Raises:
        PrivacyError: A ledger of the home cannot be opened.
        StoreUnavailable: A file cannot be written.
    """
    for each in before:
        if each.contents is None:
            with (
                os_errors(StoreUnavailable, f"write {each.path}"),
                contextlib.suppress(ValueError),  # The run says what is wrong with it.
            ):
                if int(each.path.read_text("ascii")) < each.answered:
                    replace_private(each.path, f"{each.answered}\n".encode())
            continue
        now = ledger_files.read_file(each.path)
        known = set(now.hashes)
        charges = [
            charge
            for charge in each.contents.charges
            if each.contents.hashes[charge.seq] not in known
        ]
        if not charges:
            continue
        with contextlib.closing(
            FileLedger(each.path.parent, now.terms, clock=clock, key=head_key())
        ) as ledger:
            for charge in charges:
                ledger.restore(charge.event, purpose=charge.purpose, count=1)
        yield (
            f"{each.path}: counted {len(charges)} charges of this machine again that "
            "its home did not know"
        )


RECORD = "home.json"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeRecord:
    """What a folder was the copy of, when this machine wrote the home last.

    Attributes:
        url: The home.
        holder: Name of the process.
        fence: Its number.
        changes: Number of the change of files.
    """

    url: str
    holder: str
    fence: int
    changes: int


@dataclass(eq=False)
class Home:
    """A folder and its home. Safe to use from several threads.

    Attributes:
        copy: The folder, and its files in the store.
        lease: This process's hold on the store.
        identity: The identity's file, by its path below the folder.
        clock: Tells time.
        listener: Called with a word about what happens.
    """

    copy: FolderCopy
    lease: HomeLease
    _: KW_ONLY
    identity: str
    clock: Clock
    listener: Callable[[str], None] = _LOG.info

    def __post_init__(self) -> None:
        """Do nothing yet."""
        self._lock = threading.Lock()
        self._is_entered = False

    @property
    def folder(self) -> Path:
        """The site's folder."""
        return self.copy.folder

    def enter(
        self,
        *,
        wait: Wait,
        head_key: Callable[[], HeadKey],
        take_over: bool = False,
    ) -> bool:
        """Become the holder, and make folder and store the same.

        Args:
            wait: Waits between looks at a home that another process holds.
            head_key: Returns the site's key, once its file is there.
            take_over: Do not wait for the holder.

        Returns:
            False if ``wait`` has ended it.

        Raises:
            HomeConflict: The folder is newer than the store, or of another site.
            JobError: There is neither a home nor a site here.
            PrivacyError: A ledger of the folder is damaged.
            StoreError: The store or the folder cannot be read or written.
        """
        record = _read_record(self.folder, self.copy.store.url)
        head = self.lease.acquire(
            wait=wait,
            listener=self.listener,
            admit=lambda head: self._admit(head, record),
            former="" if record is None else record.holder,
            take_over=take_over,
        )
        if head is None:
            return False
        try:
            # Without a change, a process before this one ended while it made the home.
            if not head.changes or (_describes(head, record) and self._is_ahead(head)):
                self.copy.restore(head.files, missing=True)
            else:
                self._replace(head, head_key)
        except CorruptObject:
            self.lease.write()  # The next holder removes what it has replaced.
            raise
        fence = self.lease.head.fence
        with _logged("remove what former machines left in the home"):
            self.copy.adopt(head.files, fence=fence)
        self.confirm()
        self._write_record(self.lease.head)
        self._is_entered = True
        self.listener(
            f"this machine holds the home of the site: fence {fence}, "
            f"{len(self.lease.head.files)} files in {self.copy.store.url}"
        )
        return True

    def confirm(self) -> None:
        """Store what has changed in the folder: durable, and under this fence.

        Raises:
            HomeConflict: Another process holds the home; nothing was stored.
            StoreError: It is not known to be stored.
        """
        with self._lock:
            self._confirm(self.copy.gather)

    def _confirm(self, gather: Callable[..., tuple[StoredFile, ...]]) -> None:
        head = self.lease.head
        files = gather(head.files, fence=head.fence)
        if files == head.files and not self.lease.was_put_back:
            self.lease.check()
            return
        head = self.lease.write(files)
        if self.lease.was_put_back:
            self.copy.forget()
            files = self.copy.gather(head.files, fence=head.fence)
            head = self.lease.write(files)
            self.lease.was_put_back = False
        self._write_record(head)
        with _logged("remove what is no longer needed from the home"):
            self.copy.sweep(files)

    def renew(self) -> None:
        """Renew the lease, if it is held; a lease that has run out is lost.

        A certificate that was renewed and a roster that was accepted meanwhile are
        stored, unless a task is just being confirmed.

        Raises:
            HomeConflict: It is lost.
            StoreError: It is not known to be renewed, and time is left.
        """
        if not self.lease.was_acquired:
            return
        try:
            self.lease.write()
            # Before that, the folder's files may be older than the home's.
            if self._is_entered and self._lock.acquire(blocking=False):
                try:
                    self._confirm(self.copy.gather_names)
                finally:
                    self._lock.release()
        except StoreError as error:
            if self.lease.seconds_left > 0:
                raise
            self.lease.lose(
                f"the home of the site was not renewed for {self.lease.seconds:g} s, "
                f"so another machine may have taken over: {error}"
            )
            _ = self.lease.head

    def release(self) -> None:
        """Let the next machine begin immediately; nothing is confirmed afterwards.

        What is not confirmed by now has released nothing, and stays in the folder.

        Raises:
            StoreError: The store cannot be written: the next machine waits.
        """
        if self.lease.was_acquired and not self.lease.is_over:
            self.lease.write(released=True)

    def _admit(self, head: HomeHead | None, record: HomeRecord | None) -> None:
        """Refuse a store that is behind this folder, or belongs to another site."""
        url, path = self.copy.store.url, self.folder / RECORD
        if head is None:
            if record is not None:
                raise HomeConflict(
                    f"{url} holds no home, but this folder was stored there: correct "
                    f"home.url, or, if this folder is the newest copy, remove {path}"
                )
            self._check_site_here()
            return
        if head.site != self.lease.site:
            raise HomeConflict(
                f"{url} is the home of site {head.site!r}, but site.toml names "
                f"{self.lease.site!r}: give each site its own home.url"
            )
        if record is not None and (
            head.fence < record.fence or head.changes < record.changes
        ):
            raise HomeConflict(
                f"{url} is at fence {head.fence}, change {head.changes}, but this "
                f"folder was stored at fence {record.fence}, change {record.changes}: "
                "the store was restored from a copy. Restore the newest version of "
                f"its object 'head'; or, if this folder is the newest copy, remove "
                f"that object and {path}"
            )
        if not head.changes:
            self._check_site_here()
        own = [file for file in head.files if file.path == self.identity]
        if any(self.copy.holds(file) is False for file in own):
            raise HomeConflict(
                f"{self.folder / self.identity} is another identity than that of the "
                f"site in {url}: use an empty folder for the site that is there, or "
                "another home.url for this one"
            )

    def _is_ahead(self, head: HomeHead) -> bool:
        """Whether no ledger of the folder was put back behind the home's."""
        ledgers = [file for file in head.files if file.path.endswith(LEDGER_NAME)]
        return all(self.copy.holds(f, or_more=True) is not False for f in ledgers)

    def _check_site_here(self) -> None:
        if not (self.folder / self.identity).exists():
            raise JobError(
                f"{self.copy.store.url} holds no home and {self.folder} no site: enrol "
                "it first (crossfed enroll)",
                key="home.url",
            )

    def _replace(self, head: HomeHead, head_key: Callable[[], HeadKey]) -> None:
        """Take the store's files, and keep what only the folder has charged."""
        before: list[LocalCharges] = charges_below(self.folder)
        known = {file.path for file in head.files}
        for path in (self.folder / "runs").rglob("state-*"):
            # Of a round that never ended: the next one must not begin with it.
            below = path.relative_to(self.folder).as_posix()
            if is_state(below) and below not in known:
                path.unlink()
        self.copy.restore(head.files)
        for text in charge_again(before, clock=self.clock, head_key=head_key):
            self.listener(text)

    def _write_record(self, head: HomeHead) -> None:
        record = HomeRecord(
            url=self.copy.store.url,
            holder=head.holder,
            fence=head.fence,
            changes=head.changes,
        )
        durable_files.write_json(self.folder / RECORD, record)


def is_current(folder: Path, url: str, head: HomeHead) -> bool:
    """Whether a folder has all that a home has, and perhaps more.

    Raises:
        CorruptObject: The folder's record of its home is damaged.
    """
    return not head.changes or _describes(head, _read_record(folder, url))


def _describes(head: HomeHead, record: HomeRecord | None) -> bool:
    return record is not None and (record.holder, record.changes) == (
        head.holder,
        head.changes,
    )


def _read_record(folder: Path, url: str) -> HomeRecord | None:
    found = durable_files.read_json(
        folder / RECORD,
        HomeRecord,
        advice="remove it if this folder holds nothing that the home lacks",
    )
    return found if found and found.url == url else None


@contextlib.contextmanager
def _logged(doing: str) -> Iterator[None]:
    try:
        yield
    except StoreError as error:  # It costs storage, and no promise.
        _LOG.warning("cannot %s: %s", doing, error)
