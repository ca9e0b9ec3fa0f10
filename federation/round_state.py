"""One round as a state machine: who was asked, who answered, what counts.

Pure: messages in, verdicts out. Everything that a site may do wrong is decided
here, so that the round loop handles sound updates only.
"""

from collections import Counter
from collections.abc import Sequence

from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    TaskKind,
)
from federation.vectors import Layout, is_finite


class RoundState:
    """The answers to the tasks of one round.

    Each asked site is open until it is settled: by its first sound answer, by its
    own word that it failed, or by an answer that must not be counted. Messages of
    strangers, of other rounds and second answers settle nothing.
    """

    def __init__(
        self,
        *,
        run_id: RunId,
        round_index: int,
        kind: TaskKind,
        cohort: Sequence[SiteId],
        layout: Layout,
    ) -> None:
        """Open a round in which every site of ``cohort`` was asked."""
        self._run_id = run_id
        self._round_index = round_index
        self._kind = kind
        self._layout = layout
        self._open = dict.fromkeys(cohort)
        self._asked = frozenset(cohort)
        self._answered: list[SiteId] = []
        self._failed: Counter[FailureKind] = Counter()

    @property
    def answered(self) -> tuple[SiteId, ...]:
        """Sites whose answer counts, in the order of arrival."""
        return tuple(self._answered)

    @property
    def failed(self) -> tuple[tuple[str, int], ...]:
        """Refused or missing answers by kind."""
        return tuple(sorted((kind.value, n) for kind, n in self._failed.items()))

    def accept(self, message: SiteMessage) -> SiteFailure | None:
        """Judge a message.

        Returns:
            None if it is a sound answer, which may be used once and now; otherwise
            what is wrong with it.
        """
        failure = self._judge(message)
        if failure is None:
            self._open.pop(message.site)
            self._answered.append(message.site)
            return None
        self._failed[failure.kind] += 1
        if message.site in self._open and not _is_stray(failure.kind):
            self._open.pop(message.site)
        return failure

    def close(self) -> list[SiteFailure]:
        """End the round: every site that is still open has missed the deadline."""
        missing = [
            self._failure(
                site, FailureKind.DEADLINE, "gave no valid answer before the deadline"
            )
            for site in self._open
        ]
        self._failed[FailureKind.DEADLINE] += len(missing)
        self._failed += Counter()  # Forget kinds that did not happen.
        self._open.clear()
        return missing

    def _judge(self, message: SiteMessage) -> SiteFailure | None:
        site = message.site
        if site not in self._asked:
            return self._failure(site, FailureKind.UNKNOWN, "was not asked")
        if (message.run_id, message.round_index) != (self._run_id, self._round_index):
            return self._judge_stray(message)
        if site not in self._open:
            return self._failure(site, FailureKind.DUPLICATE, "answered twice")
        return self._judge_answer(message)

    def _judge_answer(self, message: SiteMessage) -> SiteFailure | None:
        if isinstance(message, SiteFailure):
            return message
        asked = TaskKind.TRAIN if isinstance(message, SiteUpdate) else TaskKind.EVALUATE
        if asked is not self._kind:
            text = f"answered {asked.value} where it was asked to {self._kind.value}"
            return self._invalid(message.site, text)
        return self._judge_update(message) if isinstance(message, SiteUpdate) else None

    def _judge_stray(self, message: SiteMessage) -> SiteFailure:
        if message.run_id != self._run_id:
            text = f"answered run {message.run_id}, not {self._run_id}"
            return self._failure(message.site, FailureKind.UNKNOWN, text)
        text = f"answered round {message.round_index} in round {self._round_index}"
        return self._failure(message.site, FailureKind.LATE, text)

    def _judge_update(self, update: SiteUpdate) -> SiteFailure | None:
        layout = self._layout
        if update.layout_digest != layout.digest:
            text = "trained a model of another layout than this run's"
            return self._invalid(update.site, text)
        for name, values, size in (
            ("values", update.delta_d, layout.size),
            ("integer values", update.integers_m, layout.num_integers),
        ):
            if values.shape != (size,):
                text = f"sent {values.size} {name}; the model has {size}"
                return self._invalid(update.site, text)
        if not is_finite(update.delta_d):
            text = "sent NaN or infinite values"
            return self._failure(update.site, FailureKind.NOT_FINITE, text)
        return None

    def _invalid(self, site: SiteId, text: str) -> SiteFailure:
        return self._failure(site, FailureKind.INVALID, text)

    def _failure(self, site: SiteId, kind: FailureKind, text: str) -> SiteFailure:
        return SiteFailure(
            run_id=self._run_id,
            round_index=self._round_index,
            site=site,
            kind=kind,
            message=text,
        )


def _is_stray(kind: FailureKind) -> bool:
    return kind in {FailureKind.UNKNOWN, FailureKind.LATE, FailureKind.DUPLICATE}
