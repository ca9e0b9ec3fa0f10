"""Whoever drops out, and whatever is repeated: nothing is lost, nothing counts twice.

Runs of the product's own sites, round loop and checkpoints, around trainers that note
what they trained. What arrives in the model and what stays in the residuals is compared
with the sum of all true updates, in float64.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from support import toy
from support.examples import few

from clients.training.error_feedback import settled
from clients.training.site import Site
from clients.training.site_state import SiteState
from cloud_adapters.storage.memory import MemoryStore
from federation.compression.apart import fitted
from federation.compression.change import RESIDUAL
from federation.compression.codec import Links, decoded
from federation.events import Event, RoundFinished
from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    RoundTask,
    SiteMessage,
    SiteUpdate,
    TaskKind,
)
from federation.protocols import LocalWeights, RunState, SiteHandler
from federation.rounds.failures import failure
from federation.vectors import Vector

ROUNDS, QUORUM = 6, 2
CODECS: list[dict[str, Any]] = [
    {"name": "int8", "block": 4},
    {"name": "int4", "block": 3},
    {"name": "int4", "block": 3, "feedback": 0.5},
    {"name": "fp4", "block": 4},
    {"name": "bf16", "feedback": 1.0},
    {"name": "top_k", "block": 4, "fraction": 0.5, "feedback": 1.0},
    {"name": "subset", "block": 3, "fraction": 0.3},
    {"name": "subset", "block": 2, "fraction": 0.3, "order": "cyclic"},
]
# What becomes of an answer: it counts; it is lost after the work; the task never
# arrives; the answer is spoilt; the site fails before it trains.
FATES = ["counts", "lost", "silent", "spoilt", "crash"]
ODDS = [0.6, 0.1, 0.1, 0.1, 0.1]
# Two for each round and site: what happens the second time, if the round is repeated.
Fates = Mapping[tuple[int, SiteId], tuple[str, str]]


class Killed(BaseException):
    """The coordinator is gone, before it has saved a round."""


class NotingTrainer(toy.QuadraticTrainer):
    """Notes the updates that it makes, by round."""

    def __init__(self, *args: Any, made: dict[int, Vector]) -> None:
        """Note them in ``made``."""
        super().__init__(*args)
        self._made = made

    def fit(self, weights_d: Vector, *args: Any, **more: Any) -> LocalWeights:
        """Train."""
        result = super().fit(weights_d, *args, **more)
        self._made[more["round_index"]] = result.weights_d - weights_d
        return result


@dataclass(kw_only=True)
class Noted(toy.Toy):
    """A run of which all is known.

    Attributes:
        fates: What becomes of each answer.
        kills: Rounds whose first attempt is not saved.
        stores: Of the sites; they outlive a coordinator.
        made: True updates by site and round, of the last time that it trained.
        sent: What words stood for, by round and site, likewise.
    """

    fates: Fates
    kills: frozenset[int] = frozenset()
    stores: dict[SiteId, MemoryStore] = field(
        default_factory=lambda: defaultdict(MemoryStore)
    )
    made: dict[SiteId, dict[int, Vector]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    sent: dict[int, dict[SiteId, Vector]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    attempts: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def links(self) -> Links:
        """The codecs, for the model."""
        return fitted(self.job.communication.links, toy.LAYOUT)

    def state(self, name: SiteId) -> SiteState:
        """What a site keeps."""
        codec = self.job.communication.codec.name
        return SiteState(name, toy.LAYOUT, self.stores[name], codec=codec)

    def _site(self, name: SiteId) -> Site:
        made = self.made[name]
        return Site(
            name,
            make_trainer=lambda: NotingTrainer(name, self.job, made=made),
            state=self.state(name),
            clock=self.clock,
            links=self.links(),
        )

    def handlers(self) -> dict[SiteId, SiteHandler]:
        """The sites."""
        return {name: self._site(name) for name in toy.SITES}

    def fate(self, index: int, site: SiteId) -> str:
        """What becomes of an answer, this time."""
        return self.fates[index, site][self.attempts[index] > 0]

    def spoil(
        self, task: RoundTask, answer: Callable[[], SiteMessage]
    ) -> Sequence[SiteMessage]:
        """Let it happen."""
        if task.kind is not TaskKind.TRAIN:
            return (answer(),)
        fate = self.fate(task.round_index, task.site)
        if fate == "silent":
            return ()
        if fate == "crash":
            return (failure(task, FailureKind.CRASHED, "rehearsed"),)
        update = answer()
        assert isinstance(update, SiteUpdate), update
        codec = self.links().up
        self.sent[task.round_index][task.site] = decoded(
            codec, update.delta_d.copy(), toy.LAYOUT.size, seed=task.round_index
        )
        if fate == "lost":
            return ()
        if fate == "spoilt":
            return (replace(update, delta_d=update.delta_d[:-1]),)
        return (update,)

    def emit(self, event: Event) -> None:
        """Kill the coordinator where it should be, the first time."""
        if isinstance(event, RoundFinished):
            index = event.round_index
            self.attempts[index] += 1
            if index in self.kills and self.attempts[index] == 1:
                raise Killed

    def to_the_end(self) -> RunState:
        """Run, with another coordinator after each kill."""
        while True:
            try:
                return self.run(emit=self.emit)
            except Killed:
                continue

    def counted(self, index: int) -> list[SiteId]:
        """Whose updates the model of a round holds: what the fates alone say."""
        second = index in self.kills
        sites = [s for s in toy.SITES if self.fates[index, s][second] == "counts"]
        return sites if len(sites) >= QUORUM else []


def noted(codec: Mapping[str, Any], fates: Fates, kills: frozenset[int]) -> Noted:
    """A run of three sites in which two answers are enough."""
    job = toy.job(
        {
            "rounds": ROUNDS,
            "communication": {"codec": codec},
            "aggregation": {"weights": "uniform"},
            "schedule": {"minimum_sites": QUORUM, "max_lost_rounds": 100},
            "evaluation": {"every": 0},
        }
    )
    run = Noted(job=job, fates=fates, kills=kills)
    run.fault = run.spoil
    return run


keys = [(index, site) for index in range(1, ROUNDS + 1) for site in toy.SITES]
fate = st.sampled_from(FATES) | st.just("counts")
all_fates = st.fixed_dictionaries({key: st.tuples(fate, fate) for key in keys})
all_kills = st.frozensets(st.integers(1, ROUNDS), max_size=3)


@pytest.mark.parametrize(
    "codec", CODECS, ids=lambda codec: "-".join(map(str, codec.values()))
)
@few(10)  # Runs of 18 answers each; the accounts do not depend on the codec.
@given(fates=all_fates, kills=all_kills)
def test_every_update_arrives_once_or_stays_in_the_residual(
    codec: dict[str, Any], fates: Fates, kills: frozenset[int]
):
    """At each site: what was counted and the residual are the sum of true updates."""
    run = noted(codec, fates, kills)
    assume(any(map(run.counted, range(1, ROUNDS + 1))))
    final = run.to_the_end()
    links, size = run.links(), toy.LAYOUT.size
    for site in toy.SITES:
        last = max(
            (r for r in range(1, ROUNDS + 1) if site in run.counted(r)), default=0
        )
        assert final.counted.get(site, 0) == last
        residual_d = np.zeros(size)
        for index, made_d in sorted(run.made[site].items()):
            residual_d = residual_d * links.feedback + made_d
            if site in run.counted(index):
                residual_d -= run.sent[index][site]
        kept = run.state(site).before(toy.RUN, ROUNDS + 1)
        found_d = settled(kept, links, size=size, counted=last)
        np.testing.assert_allclose(found_d, residual_d, atol=1e-5)
    model_d = np.zeros(size)
    for index in range(1, ROUNDS + 1):
        if counted := run.counted(index):
            model_d += np.mean([run.sent[index][site] for site in counted], axis=0)
    np.testing.assert_allclose(final.weights_d, model_d, atol=1e-5)


def test_with_all_of_the_residual_nothing_is_ever_lost():
    """With beta = 1: counted words and final residual are the sum of all updates."""
    draws = np.random.default_rng(5)
    fates = {key: tuple(draws.choice(FATES, 2, p=ODDS)) for key in keys}
    run = noted(CODECS[1], fates, frozenset({2, 4}))  # type: ignore[arg-type]
    final = run.to_the_end()
    links = run.links()
    for site in toy.SITES:
        kept = run.state(site).before(toy.RUN, ROUNDS + 1)
        counted = final.counted.get(site, 0)
        left_d = settled(kept, links, size=toy.LAYOUT.size, counted=counted)
        arrived_d = sum(
            run.sent[index][site]
            for index in range(1, ROUNDS + 1)
            if site in run.counted(index)
        )
        np.testing.assert_allclose(
            left_d + arrived_d, sum(run.made[site].values()), atol=1e-5
        )


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["name"])
def test_a_repeated_round_is_the_same_round(codec: dict[str, Any]):
    """Killed before any round was saved, or not: the same model, bit for bit."""
    draws = np.random.default_rng(6)
    fates = {key: (choice := str(draws.choice(FATES, p=ODDS)), choice) for key in keys}
    runs = [
        noted(codec, fates, kills).to_the_end()
        for kills in (frozenset(), frozenset(range(1, ROUNDS + 1)))
    ]
    assert runs[0].weights_d.tobytes() == runs[1].weights_d.tobytes()
    assert runs[0].counted == runs[1].counted


@few(20)
@given(fates=all_fates, kills=all_kills, codec=st.sampled_from(CODECS))
def test_what_changes_leave_out_stays_with_the_aggregator(
    fates: Fates, kills: frozenset[int], codec: dict[str, Any]
):
    """Model and residual are the sum of all steps, whichever rounds are repeated."""
    run = noted(CODECS[0], fates, kills)
    down = {**codec, "feedback": 1.0}
    tables = {
        "rounds": ROUNDS,
        "communication": {
            "codec": CODECS[0],
            "down_codec": down,
            "down_content": "change",
        },
        "aggregation": {"weights": "uniform"},
        "schedule": {"minimum_sites": QUORUM, "max_lost_rounds": 100},
        "evaluation": {"every": 0},
    }
    run.job = toy.job(tables)
    assume(any(map(run.counted, range(1, ROUNDS + 1))))
    final = run.to_the_end()
    wanted_d = np.zeros(toy.LAYOUT.size)
    for index in range(1, ROUNDS + 1):
        if counted := run.counted(index):
            wanted_d += np.mean([run.sent[index][site] for site in counted], axis=0)
    found_d = final.weights_d + final.optimizer[RESIDUAL]
    np.testing.assert_allclose(found_d, wanted_d, atol=1e-5)
