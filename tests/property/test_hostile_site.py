"""Whatever a site sends the coordinator: it counts as a failure, and others continue.

The grid, its frames and its handshake are whole; Flower is made of two dicts. What is
sent comes from a site whose key the roster pins, or from any node of Flower.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from support import toy_sites, wire_messages
from support.agents import RUN_ID, consortium
from support.lying_sites import FRACTION, Lies, beside, weight_of
from support.secure_runs import Run, run, secure_job
from support.small_jobs import small_job

from cloud_adapters.flower import simulation as flower_simulation
from deploy.aggregator_host.handshake import SignedHandshake
from federation import events
from federation.clock import VirtualClock
from federation.errors import FederationError, QuorumNotMet, SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.messages import (
    RoundTask,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.rounds.gather import exchange
from federation.wire import frame as wire
from privacy.membership import introduction
from privacy.membership.introduction import Introduction
from privacy.secagg.agreement.identity import Label
from privacy.secagg.protocol.train import HEADER_SLOTS

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import ConfigRecord, Error, Message, RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from cloud_adapters.flower import (  # noqa: E402
    handshake as flower_handshake,
    site as flower_site,
)
from cloud_adapters.flower.grid import FlowerGrid  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.flower]

HONEST, HOSTILE = SiteId("site-0"), SiteId("site-1")
SITES = [HONEST, HOSTILE]
TASK = RoundTask(
    run_id=RUN_ID,
    round_index=1,
    site=HONEST,
    kind=TaskKind.TRAIN,
    layout_digest="ab" * 32,
    weights_d=np.ones(4, dtype=np.float32),
    integers_m=np.zeros(1, dtype=np.int64),
    evaluate=False,
    evaluate_after=False,
)
MOST_CHARS = 4000
NOTHING: Mapping[str, Any] = {}
often = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass
class Flower:
    """Two nodes: one answers as it should, the other what it is told to.

    Attributes:
        says: The content, or error, of every answer of the hostile node.
    """

    says: Any
    _open: dict[str, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self._app = flower_site.client_app(toy_sites.echo_site)

    def get_node_ids(self) -> list[int]:
        return [1, 2]

    def push_messages(self, messages: list[Message]) -> Iterator[str]:
        for message in messages:
            name = f"m{len(self._open)}"
            message.metadata.__dict__["_message_id"] = name
            self._open[name] = message
            yield name

    def pull_messages(self, ids: list[str]) -> list[Message]:
        return [self._reply(self._open[name]) for name in ids if name in self._open]

    def _reply(self, message: Message) -> Message:
        is_greeting = message.metadata.message_type == "query"
        if is_greeting or message.metadata.dst_node_id == 1:
            return self._app(message, None)
        return Message(self.says, reply_to=message)


def fits_a_line(text: str) -> bool:
    """Whether a terminal or a log may be shown it."""
    return len(text) < MOST_CHARS and all(wire.one_line(c) == c for c in text)


def exchanged(says: Any) -> list[Any]:
    """What comes back from a task for each site, the honest one's first."""
    grid = FlowerGrid(Flower(says), SITES, clock=VirtualClock())
    tasks = [replace(TASK, site=site) for site in SITES]
    replies = [one.message for one in exchange(grid, tasks, deadline_seconds=60.0)]
    return sorted(replies, key=lambda message: message.site)


def harms_nobody(says: Any) -> None:
    """The honest site's update is there, and nothing else passes for one of it."""
    honest, hostile = exchanged(says)
    assert isinstance(honest, SiteUpdate)
    assert (honest.site, hostile.site) == (HONEST, HOSTILE)
    if isinstance(hostile, SiteFailure):
        assert fits_a_line(hostile.message)


keys = st.sampled_from(["site", "type", "bytes", "references", "deadline_seconds"])
texts = st.text(max_size=40)
scalars = st.one_of(
    *(texts, st.binary(max_size=80), st.booleans()),
    *(st.integers(-(2**63), 2**63 - 1), st.floats()),
)
configs = st.dictionaries(keys | texts, scalars, max_size=6).map(ConfigRecord)
contents = st.dictionaries(st.just("about") | texts, configs, max_size=3).map(
    RecordDict
)
failures = st.builds(Error, st.integers(0, 1000), st.none() | st.text(max_size=3000))


FRAMELESS = ConfigRecord({"type": flower_site._STYPE, "bytes": "no bytes"})


@given(says=contents | failures)
@example(says=RecordDict({"about": FRAMELESS}))
@often
def test_answers_of_any_make(says: Any):
    """Records of Flower with whatever names, types and values, and its errors."""
    harms_nobody(says)


@given(
    answer=wire_messages.messages,
    site=st.sampled_from([*SITES, None]),
    references=texts | st.just('[{"field": "delta_d", "name": "x"}]'),
)
@often
def test_frames_of_any_content(answer: Any, site: SiteId | None, references: str):
    """Of every kind, also tasks, and in another site's name."""
    if site is not None:
        answer = replace(answer, site=site, run_id=RUN_ID)
    says = flower_site.pack_frame(flower_site.inline(answer))  # type: ignore[attr-defined]
    says.config_records["about"]["references"] = references
    harms_nobody(says)


@given(answer=wire_messages.updates, data=st.data())
@often
def test_damaged_frames(answer: SiteUpdate, data: st.DataObject):
    """A byte that is another, or bytes that are missing."""
    frame = bytearray(wire.encode_bytes(replace(answer, site=HOSTILE, run_id=RUN_ID)))
    at = data.draw(st.integers(0, len(frame) - 1))
    if data.draw(st.booleans()):
        frame[at] ^= data.draw(st.integers(1, 255))
    else:
        del frame[at:]
    says = flower_site._around(bytes(frame), flower_site._STYPE, {})
    _, hostile = exchanged(says)
    assert isinstance(hostile, SiteFailure)
    harms_nobody(says)


MEMBERS = consortium(*SITES)
JOB = small_job(num_sites=2)


def called() -> SignedHandshake:
    """A handshake of the two sites."""
    return SignedHandshake.of(
        JOB, RUN_ID, aggregator=MEMBERS.aggregator, roster=MEMBERS.roster
    )


def introduced(
    call: SignedHandshake, site: SiteId, changes: Mapping[str, Any] = NOTHING
) -> bytes:
    """What a site answers, or would if some of it were otherwise."""
    honest = Introduction(
        version=introduction.VERSION,
        site=site,
        proposal=introduction.digest(call.question),
        release="1",
        refused="",
        privacy=None,
        num_examples=3,
    )
    fields = introduction.encode(honest)  # type: ignore[attr-defined]
    assert isinstance(fields, dict)
    body = json.dumps(fields | changes).encode()
    return MEMBERS.sites[site].sign(Label.PROMISE, body) + body


values = st.recursive(
    texts | st.booleans() | st.none() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner),
    max_leaves=5,
)
changes = st.dictionaries(
    st.sampled_from([*Introduction.__dataclass_fields__, "more"]), values, max_size=3
)


def call_digest(call: SignedHandshake) -> str:
    """What an answer to this call names."""
    return introduction.digest(call.question)


def believed(call: SignedHandshake, answer: bytes) -> SiteId | None:
    """The site that an answer is believed to be of; every refusal fits a line."""
    said = ""
    try:
        return call.site_of(answer)
    except FederationError as error:
        said = str(error)
    assert fits_a_line(said)
    return None


@given(changes=changes | st.fixed_dictionaries({"refused": st.text(max_size=9000)}))
@example(changes={"site": HONEST})
@example(changes={"proposal": "00" * 32})
@example(changes={"num_examples": -1})
@often
def test_introductions_that_a_site_has_signed(changes: dict[str, Any]):
    """With whatever in them, none passes for another site's."""
    call = called()
    found = believed(call, introduced(call, HOSTILE, changes))
    assert found in {None, HOSTILE}
    if found is not None:
        assert changes.get("proposal", call_digest(call)) == call_digest(call)
        assert call.introductions[HOSTILE].num_examples >= 0
    assert call.introductions.keys() <= {HOSTILE}
    assert call.site_of(introduced(call, HONEST)) == HONEST


@given(data=st.binary(max_size=300), at=st.integers(0, 63))
@often
def test_introductions_that_nobody_has_signed(data: bytes, at: int):
    """No node becomes a site by them."""
    call = called()
    spoiled = bytearray(introduced(call, HOSTILE))
    spoiled[at] ^= 1
    for answer in (data, bytes(spoiled), bytes(64) + data):
        assert believed(call, answer) is None
    assert not call.introductions


@given(says=contents | failures | st.binary(max_size=200).map(flower_site.pack_bytes))
@often
def test_nodes_that_answer_the_handshake_with_anything(says: Any):
    """They are no sites, and a run that needs no others begins without them."""
    call, clock = called(), VirtualClock()
    flower = Flower(says)
    flower._app = lambda message, _: Message(
        flower_site.pack_bytes(introduced(call, HONEST))
        if message.metadata.dst_node_id == 1
        else says,
        reply_to=message,
    )

    def meet(sites: list[SiteId]) -> dict[SiteId, int]:
        attendance = flower_handshake.Attendance(handshake=call, connect_seconds=60.0)
        nodes, _ = attendance.find_nodes(
            flower, sites, clock=clock, pause=lambda: clock.sleep(1.0)
        )
        return nodes

    assert meet([HONEST]) == {HONEST: 1}
    with pytest.raises(SiteError, match="the run cannot start") as caught:
        meet(SITES)
    _, *lines = str(caught.value).split("\n")
    assert len(lines) == 2
    assert all(fits_a_line(each) for each in lines)


def test_the_honest_ones_count():
    """Or nothing above could fail."""
    echo = toy_sites.echo_site(HOSTILE, "")
    says = flower_site.pack_frame(
        flower_site.inline(echo.handle(replace(TASK, site=HOSTILE)))  # type: ignore[attr-defined]
    )
    honest, other = exchanged(says)
    assert isinstance(honest, SiteUpdate)
    assert isinstance(other, SiteUpdate)
    call = called()
    assert call.site_of(introduced(call, HOSTILE)) == HOSTILE


SCALING = secure_job(5, threshold=5, clip_norm=8.0, rounds=2)
UNIFORM = secure_job(
    5, threshold=4, clip_norm=8.0, rounds=2, aggregation={"weights": "uniform"}
)
EXAMPLES = 12  # of each site


def lied(job: JobSpec, lies: Lies) -> Run:
    """A run of which one site lies, with real sessions through the product's gather."""
    return run(job, wraps={HOSTILE: lies.told_by})


def loses_the_round(job: JobSpec, lies: Lies, said: str) -> None:
    """The round before stands, and the run's record says what no honest site does."""
    found = lied(job, lies)
    assert found.statuses() == ["completed", "lost"]
    (warning,) = [text for text in found.warnings() if "a site lied" in text]
    assert said in warning


@pytest.mark.parametrize("job", [SCALING, UNIFORM], ids=["examples", "uniform"])
@pytest.mark.parametrize("weight", [-3.999999, -4.0, -1e9, 2.0, 1 + 2.0**-30])
def test_weight_that_no_honest_site_has_loses_the_round(job: JobSpec, weight: float):
    """What one site says of its weight scales nobody's mean, by nothing."""
    loses_the_round(job, Lies(header=weight_of(weight)), "weight")


@pytest.mark.parametrize("weight", [-3.5, 0.0])
def test_weight_other_than_one_loses_a_uniform_round(weight: float):
    """By examples it could be honest: then it bounds the norm of the sum, too."""
    loses_the_round(UNIFORM, Lies(header=weight_of(weight)), "weight")


@pytest.mark.parametrize(
    ("slot", "steps"),
    [
        ("training_count", 1 << 40),
        ("training_count", -(1 << 62)),
        ("training_correct", 1 << 40),
        ("training_correct", -1_000_000),
        ("training_loss", -(1 << 50)),
        ("evaluation_count", -1_000_000),
        ("evaluation_correct", 1_000_000),
        ("evaluation_loss", 1 << 63),
    ],
)
def test_number_that_no_honest_site_reports_loses_the_round(slot: str, steps: int):
    """Of predictions, hits and losses, by itself or beside the others."""
    loses_the_round(SCALING, Lies(header={slot: steps}), slot.partition("_")[0])


def test_evaluation_of_more_than_a_site_can_hold_loses_the_round():
    """Or its loss and accuracy would be those of the run."""
    lie = {"evaluation_count": 1 << 55, "evaluation_correct": 1 << 55}
    loses_the_round(SCALING, Lies(header=lie), "predictions in evaluation")


def test_small_weight_gains_nothing():
    """It passes for honest by itself, but not beside the sum of the updates."""
    # The others' weight is all but taken back: 5/12 are left.
    lie = Lies(header={"weight": (5 - 5 * EXAMPLES) * FRACTION // EXAMPLES})
    job = secure_job(5, threshold=5, clip_norm=0.05, rounds=2)  # All are clipped.
    loses_the_round(job, lie, "with a total weight of 0.416667 reach at most")


@pytest.mark.parametrize("job", [SCALING, UNIFORM], ids=["examples", "uniform"])
def test_update_beyond_the_clip_norm_loses_the_round(job: JobSpec):
    """A site that does not clip itself is noticed beyond the bound of all together."""
    loses_the_round(job, Lies(vector=beside(2**31 // 3)), "norm of the sum")


whole_steps = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)
slots = st.sampled_from(HEADER_SLOTS)


@given(
    header=st.dictionaries(slots, whole_steps, max_size=3),
    steps=st.floats(-(2.0**31), 2.0**31) | st.just(0.0),
    uniform=st.booleans(),
)
@example(header={"weight": -FRACTION // 2}, steps=0.0, uniform=False)
@settings(often, max_examples=8)  # Each is a whole run.
def test_whatever_a_site_sends_no_mean_is_beyond_the_clip_norm(
    header: dict[str, int], steps: float, *, uniform: bool
):
    """A round is lost, or its mean is one that clipped updates have."""
    job = UNIFORM if uniform else SCALING
    found = lied(job, Lies(header=header, vector=beside(steps)))
    for end in found.seen:
        if isinstance(end, events.RoundFinished) and end.update_norm is not None:
            assert end.update_norm <= 8.0 * (1 + 1e-3)


def test_evaluation_that_nobody_was_asked_for_loses_the_round():
    """A site cannot put metrics into a round that takes none."""
    job = secure_job(5, threshold=5, rounds=2, evaluation={"every": 0})
    loses_the_round(job, Lies(header={"evaluation_count": 1}), "no site was asked")


def test_lie_in_the_last_evaluation_leaves_no_metrics():
    """The model is there, its metrics are none, and the warning says why."""
    found = lied(SCALING, Lies(header={"evaluation_correct": 1 << 20}, round_index=3))
    assert found.statuses() == ["completed", "completed"]
    assert any("evaluated the final model" in text for text in found.warnings())
    assert any("a site lied" in text for text in found.warnings())


def test_weight_in_the_last_evaluation_leaves_no_metrics():
    """Nobody trains there, so nobody has a weight."""
    found = lied(SCALING, Lies(header={"weight": 1}, round_index=3))
    assert any("no site trained" in text for text in found.warnings())


def test_lies_that_every_round_holds_end_the_run_with_the_reason():
    """The operator learns that a site lied, not only that rounds were lost."""
    lie = Lies(header=weight_of(-3.9), round_index=1)
    job = secure_job(5, threshold=5, rounds=1)
    with pytest.raises(QuorumNotMet):
        lied(job, lie)


def test_sites_that_tell_the_truth_lose_no_round():
    """Or nothing above could fail."""
    for job in (SCALING, UNIFORM):
        found = lied(job, Lies())
        assert found.statuses() == ["completed", "completed"]
        assert not any("lied" in text for text in found.warnings())
