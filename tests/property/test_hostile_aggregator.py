"""Whatever an aggregator sends a site: refused in a line, and the site works on.

The site is a whole one, with its agent, its frames and Flower's node, but for the
network. What is sent comes from who holds the aggregator's key, or from who does not.
"""

import base64
import importlib.util
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support import agents, wire_messages
from support.agents import RUN_ID, Consortium, consortium
from support.small_jobs import small_job

from clients.models.model_pool import ModelPool
from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.transport.frames import Frames
from deploy.site_host.agent import SiteAgent
from deploy.site_host.run_status import REFUSED
from federation.clock import SystemClock
from federation.errors import FederationError
from federation.ids import SiteId
from federation.job import job_file
from federation.messages import RoundTask, SecureTask, SiteUpdate, TaskKind
from federation.wire import frame as wire
from privacy.membership import introduction
from privacy.secagg.agreement.identity import Label

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from cloud_adapters.flower import site as flower_site  # noqa: E402
from cloud_adapters.flower.node import FlowerNode  # noqa: E402
from privacy.membership.certificates import new_key  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.flower]

NAME = SiteId("site-0")
JOB = small_job(num_sites=2)
often = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(kw_only=True)
class Site:
    """A site with a run that it takes part in."""

    agent: SiteAgent
    node: FlowerNode
    members: Consortium
    task: RoundTask
    logged: list[logging.LogRecord] = field(default_factory=list)

    def hear(self, content: RecordDict, kind: str) -> Message:
        """Have the node answer a message."""
        self.logged.clear()
        message = Message(content, 1, kind)
        message.metadata.__dict__["_message_id"] = "m"
        return self.node._answer(message)

    def works(self) -> bool:
        """Whether an honest proposal and an honest task are answered."""
        sealed = introduction.seal_proposal(
            agents.proposal(JOB), self.members.aggregator
        )
        answer = self.hear(flower_site.pack_bytes(sealed), "query")
        promised = introduction.open_introduction(
            flower_site.unpack_bytes(answer.content), self.members.roster, sealed
        )
        reply = self.hear(packed(wire.encode_bytes(self.task)), "train")
        update = wire.decode(flower_site.unpack(reply.content))
        return not promised.refused and isinstance(update, SiteUpdate)


def packed(frame: bytes) -> RecordDict:
    return flower_site.pack(frame, site=NAME, job_text="", deadline_seconds=60.0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    members = consortium(NAME, "site-1")
    agent = agents.agent(folder, NAME, members)
    frames = Frames(store=LocalStore(folder / "store"), scratch=folder / "scratch")
    pool = ModelPool(JOB)
    weights_d, integers_m = pool.initial_weights()
    task = RoundTask(
        run_id=RUN_ID,
        round_index=1,
        site=NAME,
        kind=TaskKind.TRAIN,
        layout_digest=pool.layout.digest,
        weights_d=weights_d,
        integers_m=integers_m,
        evaluate=False,
        evaluate_after=False,
    )
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    node = FlowerNode(
        app=flower_site.agent_app(agent, frames),
        address="127.0.0.1:1",
        root_certificates=None,
        key=new_key(),
        clock=SystemClock(),
    )
    made = Site(agent=agent, node=node, members=members, task=task)
    handler = logging.Handler()
    handler.emit = made.logged.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield made
    logging.getLogger().removeHandler(handler)
    agent.close()


def refused_quietly(site: Site, content: RecordDict, kind: str) -> None:
    """Either an error of ours, or an answer that is a message of this site."""
    reply = site.hear(content, kind)
    for record in site.logged:
        assert record.exc_info is None, record.getMessage()
        assert "\n" not in record.getMessage()
        assert len(record.getMessage()) < 10_000
    if reply.has_error():
        known = {kind.__name__ for kind in _kinds_of(FederationError)}
        assert reply.error.reason.partition(":")[0] in known, reply.error.reason
        return
    try:
        sealed = flower_site.unpack_bytes(reply.content)
    except FederationError:
        answer = wire.decode(flower_site.unpack(reply.content))
        assert answer.site == NAME
    else:
        assert json.loads(sealed[64:])["site"] == NAME
    assert site.works()


def _kinds_of(error: type[Exception]) -> set[type[Exception]]:
    below = error.__subclasses__()
    return {error}.union(*(_kinds_of(kind) for kind in below))


texts = st.text(max_size=40)
keys = st.sampled_from(["site", "type", "bytes", "references", "deadline_seconds"])
scalars = st.one_of(
    *(texts, st.binary(max_size=80), st.booleans()),
    *(st.integers(-(2**63), 2**63 - 1), st.floats()),
)
types = st.sampled_from([flower_site._STYPE, flower_site._BYTES_STYPE, ""])
configs = st.dictionaries(keys | texts, scalars, max_size=6).map(ConfigRecord)
arrays = st.builds(
    Array,
    st.sampled_from(["uint8", "float32", "object", ""]),
    st.tuples(st.integers(0, 10)),
    types,
    st.binary(max_size=80),
)
records = st.one_of(
    configs,
    st.dictionaries(texts | st.just("bytes"), arrays, max_size=3).map(ArrayRecord),
    st.dictionaries(texts, st.integers(0, 9), max_size=3).map(MetricRecord),
)
contents = st.dictionaries(
    st.sampled_from(["about", "frame"]) | texts, records, max_size=3
).map(RecordDict)
kinds = st.sampled_from(
    ["query", "train", "evaluate", "train.other", "query.run", "system"]
)


@given(content=contents, kind=kinds)
@often
def test_messages_of_any_make(site: Site, content: RecordDict, kind: str):
    """Records of Flower with whatever names, types and values."""
    refused_quietly(site, content, kind)


def aimed(task: Any, aim: set[str], task_of_run: RoundTask) -> Any:
    """A message that names this site and its run, or even its model."""
    if "names" in aim:
        task = replace(task, site=NAME, run_id=RUN_ID)
    if "model" in aim and isinstance(task, RoundTask):
        task = replace(task, layout_digest=task_of_run.layout_digest)
    return task


@given(
    task=wire_messages.messages,
    aim=st.sets(st.sampled_from(["names", "model"])),
    about=st.dictionaries(keys, scalars, max_size=2),
    kind=kinds,
)
@often
def test_frames_of_any_content(
    site: Site, task: Any, aim: set[str], about: dict[str, Any], kind: str
):
    """Well formed ones of every kind, some for this site, its run and its model."""
    task = aimed(task, aim, site.task)
    content = packed(wire.encode_bytes(task))
    record = content.config_records["about"]
    for key, value in about.items():
        record[key] = value
    refused_quietly(site, content, kind)


@given(task=wire_messages.secure_tasks, data=st.data())
@often
def test_damaged_frames(
    site: Site,
    task: SecureTask,
    data: st.DataObject,
):
    """A byte that is another, or bytes that are missing."""
    frame = bytearray(wire.encode_bytes(replace(task, site=NAME, run_id=RUN_ID)))
    at = data.draw(st.integers(0, len(frame) - 1))
    if data.draw(st.booleans()):
        frame[at] ^= data.draw(st.integers(1, 255))
    else:
        del frame[at:]
    refused_quietly(site, packed(bytes(frame)), "train")


references = st.lists(
    st.fixed_dictionaries(
        {
            "field": st.sampled_from(["weights_d", "integers_m", "delta_d", "words"]),
            "name": st.sampled_from(["0" * 32, "../../etc/passwd", ""]) | texts,
            "size": st.sampled_from([0, -1, 60, 1 << 40, 1 << 70])
            | st.integers(-5, 80),
            "sha256": st.just("a" * 64) | texts,
        }
    ),
    max_size=3,
).map(json.dumps)


@given(text=references | texts, num_inline=st.sampled_from([0, None]))
@often
def test_references_of_any_content(site: Site, text: str, num_inline: int | None):
    """To other places, of other sizes, or no references at all."""
    task = replace(site.task, weights_d=site.task.weights_d[:num_inline])
    content = packed(wire.encode_bytes(task))
    content.config_records["about"]["references"] = text
    refused_quietly(site, content, "train")


values = st.recursive(
    scalars.filter(lambda one: not isinstance(one, bytes)) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner),
    max_leaves=5,
)
_HONEST = job_file.document(JOB)
_PATHS = [
    (table, key)
    for table, value in _HONEST.items()
    if isinstance(value, dict)
    for key in value
]
jobs = texts | st.sampled_from(
    ["[" * 50_000, "a = " + "[" * 5_000, "a.b." * 5_000 + "c = 1"]
)
_TOML = st.tuples(st.sampled_from(_PATHS), values)


def with_value(path: tuple[str, str], value: object) -> str:
    """The honest job with another value of a key, as TOML."""
    import tomli_w  # noqa: PLC0415

    changed = {**_HONEST, path[0]: {**_HONEST[path[0]], path[1]: value}}
    try:
        return tomli_w.dumps(changed)
    except (TypeError, ValueError):
        return ""  # TOML has no such value.


anchors = st.fixed_dictionaries(
    {
        "site": values | st.just("site-0"),
        "anchor": values | st.fixed_dictionaries({"train": values, "evaluate": values}),
    }
)
signed = st.fixed_dictionaries(
    {},
    optional={
        "version": values,
        "run_id": values | st.sampled_from(["../../x", "/etc", "a" * 300]),
        "job": values | jobs,
        "release": values | st.just("x" * 10_000),
        "code_hash": values,
        "nonce": values,
        "anchors": values | st.lists(anchors, max_size=3),
        "more": values,
    },
)


@given(changes=signed, data=st.data())
@often
def test_proposals_that_the_aggregator_has_signed(
    site: Site,
    changes: dict[str, Any],
    data: st.DataObject,
):
    """With whatever in them; only why is written outside the folder of runs."""
    fields = introduction.encode(agents.proposal(JOB, run_id="20260102-030405-ffffff"))  # type: ignore[attr-defined]
    if data.draw(st.booleans()):
        fields["job"] = with_value(*data.draw(_TOML))
    fields.update(changes)
    if data.draw(st.booleans()):
        del fields[data.draw(st.sampled_from(sorted(fields)))]
    body = json.dumps(fields).encode()
    sealed = site.members.aggregator.sign(Label.PROPOSAL, body) + body
    runs = site.agent.config.folder / "runs"
    assert site.works()  # So that its audit log is there.
    before = _files(site.agent.config.folder, but=runs)
    refused_quietly(site, flower_site.pack_bytes(sealed), "query")
    noted = {site.agent.config.folder / REFUSED}
    assert _files(site.agent.config.folder, but=runs) - noted == before - noted


def _files(folder: Path, *, but: Path) -> set[Path]:
    above = folder.parent
    return {path for path in above.rglob("*") if but not in path.parents}


stated = st.lists(
    texts | st.binary(max_size=200).map(lambda data: base64.b64encode(data).decode()),
    max_size=3,
)


@given(
    fields=st.fixed_dictionaries(
        {
            "version": st.just(introduction.VERSION) | values,
            "run_id": st.sampled_from([RUN_ID, "../../x", "20260102-030405-000009"])
            | values,
            "introductions": stated | values,
        },
        optional={"more": values},
    )
)
@often
def test_statements_that_the_aggregator_has_signed(site: Site, fields: dict[str, Any]):
    """Of other sites, or of none; what is not signed by a site counts for nothing."""
    body = json.dumps(fields).encode()
    sealed = site.members.aggregator.sign(Label.STATEMENTS, body) + body
    refused_quietly(site, flower_site.pack_bytes(sealed), "query")


@given(data=st.binary(max_size=400), at=st.integers(0, 63))
@often
def test_proposals_that_nobody_has_signed(site: Site, data: bytes, at: int):
    """They get an error for an answer, and no signature."""
    honest = bytearray(
        introduction.seal_proposal(agents.proposal(JOB), site.members.aggregator)
    )
    honest[at] ^= 1
    for sealed in (data, bytes(honest)):
        content = flower_site.pack_bytes(sealed)
        assert site.hear(content, "query").has_error()
        refused_quietly(site, content, "query")


def test_the_honest_ones_are_answered(site: Site):
    """Or nothing above could fail."""
    assert site.works()
    assert isinstance(site.task.weights_d, np.ndarray)
