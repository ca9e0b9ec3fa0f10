"""A store whose replies get lost, whose writes arrive late, and that is interrupted."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

from support.faulty_store import FaultyStore

from federation.errors import StoreError, StoreUnavailable
from federation.protocols import Buffer, ObjectInfo, ObjectStore

Fate = Literal["well", "lost", "late", "away"]


class AwkwardStore(FaultyStore):
    """Passes everything on, unless a test has other plans for the next writes.

    Attributes:
        fates: Of the next writes: ``lost`` is carried out without a reply, ``late``
            is carried out by ``deliver``, ``away`` never; then all go well.
        meanwhile: Called before each write, once: what another machine does while
            this one pauses.
        is_away: Whether every request fails.
        late: Writes that are still on their way.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.fates: list[Fate] = []
        self.meanwhile: Callable[[], object] | None = None
        self.is_away = False
        self.late: list[Callable[[], ObjectInfo]] = []

    def put(self, key: str, data: Iterable[Buffer], **options: Any) -> ObjectInfo:
        content = b"".join(data)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        fate = self.fates.pop(0) if self.fates else "well"
        if self.is_away or fate == "away":
            raise StoreUnavailable("away")
        if fate == "late":
            self.late.append(lambda: self.store.put(key, [content], **options))
            raise StoreUnavailable("no reply")
        info = self.store.put(key, [content], **options)
        if fate == "lost":
            raise StoreUnavailable("no reply")
        return info

    def read(self, key: str, **options: Any) -> bytes:
        self._come()
        return super().read(key, **options)

    def stat(self, key: str) -> ObjectInfo:
        self._come()
        return super().stat(key)

    def deliver(self) -> None:
        """Let every write arrive that is on its way."""
        late, self.late = self.late, []
        for write in late:
            with contextlib.suppress(StoreError):  # Its condition no longer holds.
                write()

    def _come(self) -> None:
        if self.is_away:
            raise StoreUnavailable("away")
