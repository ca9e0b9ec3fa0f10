"""What is done about tasks and answers that are lost on the way.

Flower delivers at most once: what a SuperLink, a proxy or a connection holds when it
dies is lost without notice. So the aggregator gives every question a name that
stays the same each time the question is sent, and probes for one that has been out
for some seconds, by a message that is its name and nothing else. The site answers with
a word: that it does not know the name, upon which the question is sent again; that it
works on it, upon which there is nothing to do but wait; or that it has answered, and
then an aggregator that has no answer by now asks for it once more. A large answer is
not sent twice because a message overtook it.

A site works once for each name. What it knows of names is in memory, and is lost with
the process: beyond that ledgers and the memory of rounds hold, as they do against an
aggregator that asks again under another name.

A name also says which earlier questions the aggregator has given up by then, without
another message: a site that is slower than the others skips those that still wait.

Not here: how messages travel (``flower_grid``, ``flower_node``).
"""

import re
import secrets
import threading
from collections import OrderedDict
from enum import StrEnum
from typing import Generic, TypeVar

# When a question is probed: for the first time, doubled each time, up to the last.
FIRST_SECONDS = 5.0
MOST_SECONDS = 15.0
# Between the first probes of two questions that were sent together.
APART_SECONDS = 0.25
# As soon as this when Flower has reported a loss.
SOON_SECONDS = 1.0
# Names that a site remembers: of many hours, while a question is out for minutes.
MAX_NAMES = 1024

_NAME_BYTES = 16
_NUMBERS = re.compile(r"(\d{1,18})-(\d{1,18})-")

Answer = TypeVar("Answer")


class Word(StrEnum):
    """What a site says of a question in place of an answer."""

    UNKNOWN = "unknown"  # it never came here
    KNOWN = "known"  # the site works on it, or has answered long ago
    ANSWERED = "answered"  # and can send the answer again


def new_name(round_index: int, oldest_open: int = 0) -> str:
    """Name a question: no two are alike, even of different askers.

    Args:
        round_index: Its round; 0 for none.
        oldest_open: The first round of which the site has an open question, this one
            included: the asker has given up those of rounds before.
    """
    return f"{round_index}-{oldest_open}-{secrets.token_hex(_NAME_BYTES)}"


def is_given_up(name: str, newer: str) -> bool:
    """Whether the asker of a newer question had given up an older one of its run."""
    older, later = _NUMBERS.match(name), _NUMBERS.match(newer)
    if older is None or later is None:
        return False
    return 0 < int(older[1]) < int(later[2])


class Inquiry:
    """Decides when one question is probed, and when it is sent again."""

    def __init__(self, now: float, index: int = 0) -> None:
        """Begin when it has been sent; times are those of one monotonic clock.

        Args:
            now: When that was.
            index: Its place among the questions that are sent together. If all were
                probed at once, a round that ends just then would wait for the words.
        """
        self._sent = now
        self._wait = FIRST_SECONDS
        self._next = now + self._wait + index * APART_SECONDS % FIRST_SECONDS

    def is_due(self, now: float) -> bool:
        """Whether to ask for its state; if so, that is taken as done."""
        if now < self._next:
            return False
        self._wait = min(2 * self._wait, MOST_SECONDS)
        self._next = now + self._wait
        return True

    def note_lost(self, now: float) -> None:
        """Ask soon: the question or its answer will not arrive."""
        self._next = min(self._next, now + SOON_SECONDS)

    def is_missing(self, word: Word, asked: float) -> bool:
        """Whether to send the question again.

        Args:
            word: What the site says.
            asked: When it was probed. A site may not have known then what has
                been sent again since.
        """
        return word is Word.UNKNOWN and asked >= self._sent

    def note_sent(self, now: float) -> None:
        """It has been sent again. It is probed no sooner than otherwise.

        Otherwise a dishonest site could request the model all the time.
        """
        self._sent = now


class Inbox(Generic[Answer]):
    """What a site knows of the questions that it was sent; for several threads.

    The last answer to a run is kept, until its next question comes: who asks that has
    received the answer before, or given it up.

    Args:
        max_runs: Of how many runs an answer is kept.
    """

    def __init__(self, max_runs: int = 1) -> None:
        """Know nothing."""
        self._names: OrderedDict[str, None] = OrderedDict()
        self._last: OrderedDict[int, tuple[str, Answer]] = OrderedDict()
        self._max_runs = max_runs
        self._lock = threading.Lock()

    def admit(self, name: str, run: int = 0) -> bool:
        """Whether to work on a question of a run that has arrived: it is a new one."""
        with self._lock:
            if name in self._names:
                return False
            self._names[name] = None
            self._last.pop(run, None)
            while len(self._last) >= self._max_runs:
                self._last.popitem(last=False)
            while len(self._names) > MAX_NAMES:
                self._names.popitem(last=False)
            return True

    def keep(self, name: str, answer: Answer, run: int = 0) -> None:
        """Keep the answer to a question; it has been sent, or could not be."""
        with self._lock:
            self._last[run] = (name, answer)

    def forget(self, name: str) -> None:
        """Take a question for unknown: it did not come whole, and is untouched."""
        with self._lock:
            self._names.pop(name, None)

    def look(self, name: str) -> Word:
        """The state of a question now."""
        with self._lock:
            if name in dict(self._last.values()):
                return Word.ANSWERED
            return Word.KNOWN if name in self._names else Word.UNKNOWN

    def answer(self, name: str) -> Answer | None:
        """The answer to a question, if it is kept."""
        with self._lock:
            return dict(self._last.values()).get(name)
