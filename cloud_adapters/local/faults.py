"""Faults that a simulation injects: the job's ``simulation.faults``.

They spoil what a site says on its way to the aggregator, as a broken or hostile
site would. The site's own code is not touched.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from federation.compression.codec import BF16
from federation.ids import SiteId
from federation.job.spec import FaultSpec
from federation.messages import (
    FailureKind,
    LeaveReason,
    MaskedUpdate,
    RoundTask,
    SecureTask,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)
from federation.protocols import Clock, SiteHandler
from federation.rounds.failures import failure
from federation.vectors import Vector, Words

_SILENCING = frozenset({"silent", "crash", "leave", "lost"})


class Restartable:
    """A site that can be recreated during a run, as by a restart.

    Args:
        make: Makes the site with what it has on its disk, and nothing in memory.
    """

    def __init__(self, make: Callable[[], SiteHandler]) -> None:
        """Make the site for the first time."""
        self._make = make
        self._site = make()

    def handle(self, task: Task) -> SiteMessage:
        """Answer a task."""
        return self._site.handle(task)

    def restart(self) -> None:
        """Lose everything in memory."""
        self._site.close()
        self._site = self._make()

    def close(self) -> None:
        """End the site's part in the run."""
        self._site.close()


@dataclass(frozen=True, slots=True)
class FaultInjector:
    """Applies a job's faults to the answers of its sites.

    Attributes:
        faults: Which, where and when.
        clock: Waits.
        seed: Makes garbage, and draws of rounds, the same in every run.
        restart: Restarts a site.
    """

    faults: Sequence[FaultSpec]
    _: KW_ONLY
    clock: Clock
    seed: int
    restart: Callable[[SiteId], None] = lambda _site: None

    def __call__(
        self, task: Task, answer: Callable[[], SiteMessage]
    ) -> Sequence[SiteMessage]:
        """Let a site answer, and apply the job's fault, if any.

        Only answers to training tasks are spoilt, by the first fault that strikes. A
        site that gives no answer to its training task is silent for the rest of the
        round: it answers no step of secure aggregation either. One that hangs takes
        part in them if its answer came in time; if not, it is not asked.
        """
        fault = self._striking(task)
        if fault is None:
            return (answer(),)
        if isinstance(task, RoundTask):
            return self._spoil(fault, task, answer)
        return () if fault.kind in _SILENCING else (answer(),)

    def returned(
        self, sites: Collection[SiteId], round_index: int
    ) -> Collection[SiteId]:
        """The sites of some that no ``leave`` keeps out of a round."""
        away = {
            fault.site
            for fault in self.faults
            if fault.kind == "leave" and self._strikes(fault, round_index)
        }
        return [site for site in sites if site not in away]

    def _striking(self, task: Task) -> FaultSpec | None:
        """Find the fault that strikes a site in the round of its task."""
        if isinstance(task, SecureTask):
            trains = task.round_index > 0  # The setup of a run trains nothing.
        else:
            trains = task.kind is TaskKind.TRAIN
        if trains:
            for fault in self.faults:
                if fault.site == task.site and self._strikes(fault, task.round_index):
                    return fault
        return None

    def _strikes(self, fault: FaultSpec, round_index: int) -> bool:
        """Whether a fault happens in a round, which the seed may have to say."""
        chosen = not fault.rounds or round_index in fault.rounds
        if not chosen or round_index % fault.every:
            return False
        if fault.probability == 1:
            return True
        entropy = [self.seed, round_index, *fault.kind.encode(), *fault.site.encode()]
        drawn = np.random.default_rng(entropy).random()
        return bool(drawn < fault.probability)

    def _spoil(
        self, fault: FaultSpec, task: RoundTask, answer: Callable[[], SiteMessage]
    ) -> Sequence[SiteMessage]:
        if fault.kind == "silent":
            return ()
        if fault.kind == "leave":
            self.restart(task.site)  # As it will be when it comes back.
            return (failure(task, FailureKind.LEAVING, LeaveReason.SPOT.value),)
        if fault.kind == "crash":
            return (failure(task, FailureKind.CRASHED, "rehearsed crash"),)
        if task.weights_d.size:  # Not once more, for the update that it keeps.
            self._befall(fault, task.site)
        return self._returned(fault, task, answer())

    def _returned(
        self, fault: FaultSpec, task: RoundTask, message: SiteMessage
    ) -> Sequence[SiteMessage]:
        """What arrives of an answer."""
        if fault.kind == "lost":
            return ()
        if fault.kind == "duplicate":
            return (message, message)
        if fault.kind == "wrong_round":
            return (replace(message, round_index=task.round_index - 1),)
        if isinstance(message, SiteUpdate):
            message = self._spoil_update(fault, message)
        elif isinstance(message, MaskedUpdate):
            message = self._spoil_masked(fault, task, message)
        return (message,)

    def _befall(self, fault: FaultSpec, site: SiteId) -> None:
        """Apply a fault that happens before a site answers."""
        if fault.kind == "hang":
            self.clock.sleep(fault.seconds)
        if fault.kind == "restart":
            self.restart(site)

    def _spoil_update(self, fault: FaultSpec, update: SiteUpdate) -> SiteUpdate:
        if fault.kind == "wrong_length":
            return replace(update, delta_d=update.delta_d[:-1])
        if fault.kind in {"nan", "inf"}:
            delta_d = update.delta_d.copy()
            bad = np.array([float(fault.kind)], np.float32)
            if delta_d.dtype == np.uint8:  # The first scale of the codec's records.
                delta_d[:2] = BF16.narrow(bad).astype("<u2").view(np.uint8)
            else:
                delta_d[delta_d.size // 2] = _words(bad, delta_d.dtype)[0]
            return replace(update, delta_d=delta_d)
        if fault.kind == "garbage":
            draws, size = self._draws(update), update.delta_d.size
            if update.delta_d.dtype == np.uint8:
                words = draws.integers(256, size=size, dtype=np.uint8)
                return replace(update, delta_d=words)
            delta_d = draws.standard_normal(size, dtype=np.float32)
            delta_d *= fault.scale / float(np.linalg.norm(delta_d))
            words = _words(delta_d, update.delta_d.dtype)
            return replace(update, delta_d=words)
        return update

    def _spoil_masked(
        self, fault: FaultSpec, task: RoundTask, update: MaskedUpdate
    ) -> MaskedUpdate | SiteFailure:
        if fault.kind == "wrong_length":
            word_bytes = max(1, update.words.size // max(1, task.weights_d.size))
            return replace(update, words=update.words[:-word_bytes])
        if fault.kind in {"nan", "inf"}:
            text = f"rehearsed crash: masked words cannot carry {fault.kind}"
            return failure(task, FailureKind.CRASHED, text)
        if fault.kind == "garbage":
            words = self._draws(update).integers(
                256, size=update.words.size, dtype=np.uint8
            )
            return replace(update, words=words)
        return update

    def _draws(self, update: SiteUpdate | MaskedUpdate) -> np.random.Generator:
        entropy = [self.seed, update.round_index, *update.site.encode()]
        return np.random.default_rng(entropy)


def _words(values_d: Vector, dtype: np.dtype[Any]) -> Words:
    """Values as the words of an update, in any codec, without its check."""
    with np.errstate(over="ignore"):  # A fault may be beyond what the type holds.
        return BF16.narrow(values_d) if dtype == BF16.dtype else values_d.astype(dtype)
