"""What a relay asks its sites, and what they answer; no I/O.

Sites ask for questions, as they cannot be called. A question stays until it is
answered or its time is over: a site that lost it, or was restarted, gets it again. Its
name is the digest of its content, so a site that has answered it before can send the
same answer once more.
"""

import hashlib
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from federation import mapped
from federation.ids import SiteId
from federation.protocols import Buffer, Clock

# A site sends word every three seconds.
SILENT_SECONDS = 12.0
_LOOK_SECONDS = 0.5


class QuestionKind(StrEnum):
    """What a question is about."""

    INTRODUCE = "introduce"
    TASK = "task"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayQuestion:
    """What one site is asked.

    Attributes:
        name: 64 hexadecimal digits.
        kind: What it is about.
        pieces: A sealed proposal, or the frame of a task, when joined. Sites whose
            tasks bring the same model share its piece.
        seconds: How long the answer may take.
        max_bytes: How long the answer may be.
    """

    name: str
    kind: QuestionKind
    pieces: tuple[Buffer, ...] = field(repr=False)
    seconds: float
    max_bytes: int

    @classmethod
    def of(
        cls,
        kind: QuestionKind,
        pieces: Sequence[Buffer],
        *,
        seconds: float,
        max_bytes: int,
    ) -> "RelayQuestion":
        """Name a question."""
        name = hashlib.sha256(kind.value.encode() + b"\0")
        for piece in pieces:
            for part in mapped.pieces(piece):
                name.update(part)
        return cls(
            name=name.hexdigest(),
            kind=kind,
            pieces=tuple(pieces),
            seconds=seconds,
            max_bytes=max_bytes,
        )

    @property
    def body(self) -> bytes:
        """The pieces, joined."""
        return b"".join(self.pieces)


class AskSites(Protocol):
    """Asks sites: ``TaskQueue.ask``."""

    def __call__(
        self,
        questions: Mapping[SiteId, RelayQuestion],
        *,
        seconds: float,
        patience: float = 0.0,
        stopped: threading.Event,
    ) -> Mapping[SiteId, Buffer | None]:
        """Return each site's answer; None if it gives none."""
        ...


class TaskQueue:
    """Questions and answers between the threads of a relay."""

    def __init__(
        self,
        sites: Collection[SiteId],
        clock: Clock,
        *,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """Know no site to be there.

        Args:
            sites: Who may ask for questions.
            clock: Tells time.
            silent_seconds: A site that is silent for longer is not awaited.
        """
        self._silent = silent_seconds
        self.sites = frozenset(sites)
        self._clock = clock
        self._change = threading.Condition()
        self._open: dict[SiteId, RelayQuestion] = {}
        self._answers: dict[SiteId, Buffer] = {}
        # As if all had been there at the start: they may be about to connect.
        self._heard = dict.fromkeys(self.sites, clock.monotonic())

    def ask(
        self,
        questions: Mapping[SiteId, RelayQuestion],
        *,
        seconds: float,
        patience: float = 0.0,
        stopped: threading.Event,
    ) -> dict[SiteId, Buffer | None]:
        """Ask sites, and wait until all have answered, are gone or time is over.

        Args:
            questions: One for each site.
            seconds: How long to wait for answers.
            patience: How long to wait at least for a site that is silent.
            stopped: Ends the wait.

        Returns:
            Each site's answer; None if it is gone or its time is over.

        Raises:
            KeyError: A site is not among those that may ask.
        """
        unknown = questions.keys() - self.sites
        if unknown:
            raise KeyError(f"the queue has no sites {sorted(unknown)}")
        begun = self._clock.monotonic()
        with self._change:
            self._answers.clear()
            self._open = dict(questions)
            self._change.notify_all()
            while self._open and not stopped.is_set():
                now = self._clock.monotonic()
                self._drop_silent(now, begun + patience)
                left = begun + seconds - now
                if not self._open or left <= 0:
                    break
                self._change.wait(min(left, _LOOK_SECONDS))
            self._open.clear()
            return {site: self._answers.pop(site, None) for site in questions}

    def next(self, site: SiteId, *, wait_seconds: float) -> RelayQuestion | None:
        """Wait for the site's next question; None if there is none in that time."""
        end = self._clock.monotonic() + wait_seconds
        with self._change:
            while True:
                now = self._clock.monotonic()
                self._heard[site] = now
                question = self._open.get(site)
                if question is not None or now >= end:
                    return question
                self._change.wait(min(end - now, _LOOK_SECONDS))

    def limit(self, site: SiteId, name: str) -> int | None:
        """How long an answer may be; None if this question is not open."""
        with self._change:
            question = self._open.get(site)
            is_open = question is not None and question.name == name
            return question.max_bytes if question and is_open else None

    def hear(self, site: SiteId) -> None:
        """Note that a site is there, and at work."""
        with self._change:
            self._heard[site] = self._clock.monotonic()

    def answer(self, site: SiteId, name: str, body: Buffer) -> bool:
        """Take an answer; return whether its question was open."""
        with self._change:
            question = self._open.get(site)
            if question is None or question.name != name:
                return False
            del self._open[site]
            self._answers[site] = body
            self._heard[site] = self._clock.monotonic()
            self._change.notify_all()
            return True

    def _drop_silent(self, now: float, until: float) -> None:
        """Give up sites that are silent, but not before a time."""
        for site in [*self._open]:
            if now - self._heard[site] > self._silent and now >= until:
                del self._open[site]
