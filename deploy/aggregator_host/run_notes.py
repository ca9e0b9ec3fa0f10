"""What the events of runs say of their progress, read on from look to look.

Answers of sites, most of a log, are looked at for bytes alone, and where those of a
round have not been added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock

from federation.events import (
    Event,
    ModelEvaluated,
    PrivacyPlanned,
    RoundFinished,
    RunFinished,
    RunStarted,
    SitesLeftOut,
)
from federation.messages import FailureKind
from monitoring.privacy_words import has_noise
from monitoring.runs.event_tail import EventTail
from monitoring.runs.numbers_reader import NumbersReader
from monitoring.views.round_view import loss_of

_KINDS = (
    PrivacyPlanned,
    RunStarted,
    RoundFinished,
    ModelEvaluated,
    RunFinished,
    SitesLeftOut,
)


@dataclass(kw_only=True)
class RunNotes:
    """Numbers of a run, repeated rounds included.

    Attributes:
        events: Beginnings and ends of coordinators, ends of rounds without names of
            sites, and sites left out.
        epsilon: The largest of a round.
        loss: The newest mean held-out loss; None if there is none yet.
        is_noisy: Whether held-out results leave some site with noise.
        replicas: Groups of sites that hold the same data.
        unheard: In how many of its rounds in a row a site had no part, by site.
        damage: The first damaged line of the log; see ``EventTail``.
    """

    events: list[Event] = field(default_factory=list)
    epsilon: float = 0.0
    loss: float | None = None
    is_noisy: bool = False
    replicas: tuple[tuple[str, ...], ...] = ()
    unheard: dict[str, int] = field(default_factory=dict)
    damage: str = ""

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case ModelEvaluated():
                self.loss = loss_of(event.pooled)
                return
            case RunStarted():
                self.replicas = event.replicas
            case PrivacyPlanned():
                self.is_noisy = has_noise(event)
                return
            case RoundFinished():
                self.epsilon = max(self.epsilon, event.epsilon or 0.0)
                self._note_unheard(event)
                event = replace(event, asked=(), answered=(), steps=())
        self.events.append(event)

    def _note_unheard(self, event: RoundFinished) -> None:
        for site in event.answered:
            self.unheard.pop(site, None)
        answered = {*event.answered}
        silent = {*event.asked} - answered
        failed = sum(n for kind, n in event.failed if kind != FailureKind.SURPLUS)
        if failed < len(silent):  # Replicas of those that answered were not needed.
            groups = (g for g in self.replicas if not answered.isdisjoint(g))
            silent.difference_update(*groups)
        if len(silent) == failed:  # Otherwise some are surplus, or still at work.
            self.unheard |= {site: self.unheard.get(site, 0) + 1 for site in silent}


class _Reader:
    """Reads on in one log."""

    def __init__(self, log: Path) -> None:
        self._tail, self._notes = EventTail(log, only=_KINDS), RunNotes()
        self._numbers: NumbersReader | None = None
        self._log, self._lock = log, Lock()

    def num_bytes(self) -> int:
        with self._lock:
            self._numbers = self._numbers or NumbersReader(self._log)
            found = self._numbers.look()
            return found.bytes.total() + found.under_way.total()

    def read(self) -> RunNotes:
        with self._lock:
            events = self._tail.news()
            if self._tail.is_anew or self._tail.is_gone:
                self._notes = RunNotes()
            for event in events:
                self._notes.add(event)
            self._notes.damage = self._tail.damage
            return self._notes


@lru_cache(maxsize=4096)
def _reader(log: Path) -> _Reader:
    return _Reader(log)


def read(log: Path) -> RunNotes:
    """Read what is new in a run's log; nothing of a log that is not there."""
    return _reader(log).read()


def num_bytes(log: Path) -> int:
    """Bytes that the aggregator of a run has sent and received, as its metrics do.

    Also in rounds that were killed, whose answers alone tell it.
    """
    return _reader(log).num_bytes()


def progress(log: Path) -> Sequence[RunStarted | RoundFinished]:
    """When a run's coordinators began and its rounds ended."""
    found = read(log).events
    return [each for each in found if isinstance(each, RunStarted | RoundFinished)]
