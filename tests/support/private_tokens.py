"""Private steps that can be told apart: an answer shows which steps it is made of.

Each step draws a number that no other has. What a site has sent, however often it was
interrupted, and whatever was put back, must hold no more numbers than were charged.
"""

import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from clients.privacy.spending import BudgetedTrainer, Releases
from clients.training.kept_steps import KeptSteps, LeftAtStep, start_digest
from clients.training.site_state import KeptState
from cloud_adapters.storage.disk.store import LocalStore
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.messages import NO_ANCHOR, LedgerAnchor, MetricSums
from federation.protocols import Clock, LocalWeights
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Vector
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_format import Terms

SITE, RUN, STEPS = SiteId("a"), RunId("run-1"), 3
NOISES = (50.0, 60.0)  # A token's last bit says with which it was made.
EVENT = PrivacyEvent(noise_multiplier=NOISES[0], sampling_rate=1.0, steps=STEPS)
TERMS = Terms(run_id=RUN, site=SITE, job_digest="00" * 32, delta=1e-5, epsilon_cap=99.0)
STATE, LEDGER = Path("sites", SITE, "steps"), Path("ledger")
JOB = job_file.parse(
    {
        "name": "small",
        "rounds": 9,
        "model": {"factory": "clients.models:logistic_regression"},
        "data": {"source": "clients.data:blobs"},
        "training": {"local_steps": STEPS},
        "aggregation": {"weights": "uniform"},
        "evaluation": {"every": 0},
        "privacy": {"differential_privacy": {"unit": "record", "target_epsilon": 9.0}},
        "sites": [{"name": SITE}],
    }
)
_NO_INTEGERS = np.zeros(0, np.int64)


class Killed(BaseException):
    """The process is gone: nothing of it is cleaned up."""


class TokenTrainer:
    """Takes steps whose results are their own numbers."""

    def __init__(self, kept: KeptSteps, level: int, dies_after: int = 0) -> None:
        """Keep steps, and die after some of them."""
        self._kept, self._level, self._dies_after = kept, level, dies_after

    def layout(self) -> Layout:
        """Have no model."""
        raise NotImplementedError

    def pay(self, **charges: object) -> None:
        """Be paid for from outside."""
        raise NotImplementedError

    def spent(self) -> None:
        """Keep no ledger."""

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
        max_loss: float | None = None,
    ) -> MetricSums:
        """Have no data."""
        raise NotImplementedError

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,  # noqa: ARG002 -- of the seam
        steps: range = range(STEPS),
    ) -> LocalWeights:
        """Take the steps that are left."""

        def start() -> str:
            return start_digest(weights_d, integers_m, {})

        def state() -> KeptState:
            facts = {"position": len(tokens)}
            return KeptState(arrays={"tokens": np.array(tokens)}, facts=facts)

        found = self._kept.begin(round_index, start)
        tokens: list[int] = [] if found is None else found.arrays["tokens"].tolist()
        for taken in range(len(tokens) + 1, len(steps) + 1):
            tokens.append(2 * int.from_bytes(os.urandom(7)) + self._level)
            if taken == self._dies_after:
                raise Killed
            self._kept.after_step(round_index, start, state)
        self._kept.forget()
        return LocalWeights(
            weights_d=weights_d,
            integers_m=integers_m,
            num_examples=1,
            num_steps=len(steps),
            training=None,
            kept={"tokens": np.array(tokens)},
        )


class Agent:
    """One process of the site, in a folder."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        anchor: LedgerAnchor = NO_ANCHOR,
        leaves_after: int = 0,
        dies_after: int = 0,
        every_seconds: float = 0.0,
        level: int = 0,
    ) -> None:
        """Open the ledger; with an anchor that the aggregator knows."""
        looks = count(1)
        self.ledger = FileLedger(folder / LEDGER, TERMS, clock=clock, anchor=anchor)
        kept = KeptSteps(
            SITE,
            LocalStore(folder),
            run_id=RUN,
            job=JOB,
            clock=clock,
            leaves=lambda: 0 < leaves_after <= next(looks),
            every_seconds=every_seconds,
        )
        releases = Releases(
            round_event=replace(EVENT, noise_multiplier=NOISES[level]),
            held_out=None,
            evaluates=False,
            max_loss=1.0,
        )
        inner = TokenTrainer(kept, level, dies_after)
        self._trainer = BudgetedTrainer(inner, self.ledger, releases, kept)

    def answer(
        self, round_index: int, model: float, num_steps: int = STEPS
    ) -> tuple[int, ...]:
        """Train a round from a model; nothing if the site leaves in its middle."""
        self._trainer.pay(
            round_index=round_index, trains=True, evaluations=0, steps=num_steps
        )
        try:
            result = self._trainer.fit(
                np.full(1, model, np.float32),
                _NO_INTEGERS,
                round_index=round_index,
                steps=range(num_steps),
            )
        except LeftAtStep:
            return ()
        assert isinstance(result, LocalWeights)
        return tuple(map(int, result.kept["tokens"]))
