"""What outlives its process: one row each for ``support.doomed``."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support import enrolments, private_tokens
from support.doomed import Durable

from aggregator.checkpoint import RunCheckpoints
from clients.privacy.site_memory import FileMemory
from cloud_adapters.keys.key_file import add_key, read_keys
from cloud_adapters.storage.cached import ObjectCache
from cloud_adapters.storage.disk.store import LocalStore
from deploy import audit_log
from deploy.aggregator_host import enrolment_operator, run_queue
from deploy.aggregator_host.config import AggregatorConfig, AggregatorFile
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.fleet import state as fleet_state
from deploy.fleet.state import DeploymentRecord, LastLaunch
from federation.clock import VirtualClock
from federation.job import job_file
from federation.protocols import RunState
from federation.vectors import Layout, Role
from monitoring.runs.run_folder import RunFolder
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger import ledger_files
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_format import Terms
from privacy.membership import roster_file
from privacy.membership.certificates import Authority

CLOCK, ENROLLED = VirtualClock(1e9), VirtualClock(enrolments.NOW)
EVENT = PrivacyEvent(noise_multiplier=10.0, sampling_rate=1.0, steps=1)
TERMS = Terms(
    run_id="run-1", site="one", job_digest="00" * 32, delta=1e-5, epsilon_cap=50.0
)
RELEASED = "released"
ROUNDS = 2


def charge(folder: Path) -> None:
    """Release what has not been released, in two sessions.

    A release is a mark in a file beside the ledger, written after ``charge`` returned.
    """
    for upto in (ROUNDS // 2, ROUNDS):
        ledger = FileLedger(folder, TERMS, clock=CLOCK)
        marks = folder / RELEASED
        done = marks.read_bytes().count(b"\n") if marks.exists() else 0
        for round_index in range(done, upto):
            spent = ledger.charge(EVENT, round_index=round_index)
            with marks.open("ab", buffering=0) as file:
                file.write(f"{round_index} {spent!r}\n".encode())
        ledger.close()


def charges(folder: Path) -> str:
    """Compare what was released with what the ledger shows."""
    marks = folder / RELEASED
    lines = marks.read_text().splitlines() if marks.exists() else []
    released = [int(line.split()[0]) for line in lines]
    assert released == [*range(len(released))]
    path = folder / ledger_files.LEDGER_NAME
    if not path.exists() or not ledger_files.is_begun(path):
        assert not released
        return "new"
    contents = ledger_files.read_file(path)
    charged = [one.round_index for one in contents.charges]
    assert {*released} <= {*charged}
    # Every release was covered by what the ledger showed when it was made.
    spent = {one.epsilon_after for one in contents.charges}
    assert {float(line.split()[1]) for line in lines} <= spent
    if len(released) < ROUNDS:
        return "charged" if len(charged) > len(released) else "released"
    return "whole"


def interrupted(folder: Path) -> None:
    """Leave a private round after each of its steps, end it, and send the answer."""
    clock = VirtualClock(1.8e9 + len([*folder.rglob("*")]))
    while not (folder / RELEASED).exists():
        agent = private_tokens.Agent(folder, clock, leaves_after=1)
        answer = agent.answer(1, 1.0)
        agent.ledger.close()
        clock.sleep(1.0)
        if answer:
            (folder / RELEASED).write_text(" ".join(map(str, answer)), "ascii")


def continued(folder: Path) -> str:
    """Compare an answer with the steps that were charged: how many more there are."""
    path = folder / private_tokens.LEDGER / ledger_files.LEDGER_NAME
    if not path.exists() or not path.read_bytes().endswith(b"\n"):
        return "nothing"
    events = ledger_files.read_file(path).events("train")
    charged = sum(event.steps for event in events)
    marks = folder / RELEASED
    sent = marks.read_text("ascii").split() if marks.exists() else []
    assert len({*sent}) == len(sent) <= charged
    assert charged <= 3 * private_tokens.STEPS, "two kills cost two rounds"
    return "answered" if sent else "charged" if charged else "nothing"


def put(number: int) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        content, told = b"%d" % number * 5, {"number": str(number)}
        LocalStore(folder).put("a/object", [content], metadata=told)

    return write


def stored(folder: Path) -> str:
    store = LocalStore(folder)
    assert [info.key for info in store.list()] == ["a/object"]
    found = store.stat("a/object").metadata["number"]
    assert store.read("a/object") == found.encode() * 5
    return found


NUMBERS = bytes(range(250)) * 4


def cache(folder: Path) -> None:
    name = hashlib.sha256(NUMBERS).hexdigest()
    ObjectCache(folder, 10_000).get(name, len(NUMBERS), lambda: NUMBERS)


def cached(folder: Path) -> str:
    names = [path for path in folder.iterdir() if not path.name.startswith(".")]
    assert [path.read_bytes() for path in names] == [NUMBERS] * len(names)
    return str(len(names))


def two_keys(folder: Path) -> None:
    if len(read_keys(folder / "keys.toml")) < 2:
        add_key(folder / "keys.toml")


LAYOUT = Layout.build([("x", (100,), "float32", Role.PARAMETER)])


def checkpoints(folder: Path) -> RunCheckpoints:
    return RunCheckpoints(
        store=LocalStore(folder),
        prefix="",
        run_id="run",
        job={},
        layout=LAYOUT,
        keep=1,
        emit=print,
        clock=CLOCK,
        chunk_bytes=200,
    )


def save_until(last: int) -> Callable[[Path], object]:
    def save(folder: Path) -> None:
        saved = checkpoints(folder)
        state = saved.load_latest()
        for index in range(state.round_index + 1 if state else 1, last + 1):
            vector_d = np.full(LAYOUT.size, index, np.float32)
            vector_d[:50] = 0.0  # A chunk that no round changes.
            saved.save(
                RunState(
                    round_index=index,
                    weights_d=vector_d,
                    integers_m=np.zeros(0, np.int64),
                    optimizer={"m": vector_d},
                    rounds_completed=index,
                    lost_in_a_row=0,
                )
            )

    return save


def newest(folder: Path) -> str:
    state = checkpoints(folder).load_latest()
    assert state is not None
    for vector_d in (state.weights_d, state.optimizer["m"]):
        assert (vector_d[50:] == state.round_index).all()
    return str(state.round_index)


def trust(site: str, digit: str) -> Callable[[Path], object]:
    def pin(folder: Path) -> None:
        party = None if site == "aggregator" else site
        roster_file.trust(
            folder / "roster.toml", site=party, organisation=site, key=digit * 64
        )

    return pin


def trusted(folder: Path) -> str:
    return str(roster_file.describe(folder / "roster.toml")[0])


def launches(number: int) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        launch = LastLaunch(role="site-a", number=number)
        record = DeploymentRecord(name="fed", owner="o", launches=(launch,))
        fleet_state.write_record(folder, record)

    return write


def launched(folder: Path) -> str:
    record = fleet_state.read_record(folder)
    assert record is not None
    return str(record.launches[0].number)


JOB = job_file.parse(
    {
        "name": "small",
        "rounds": 1,
        "model": {"factory": "clients.models:logistic_regression"},
        "data": {"source": "clients.data:blobs"},
        "training": {"local_steps": 1},
        "sites": [{"name": "one"}],
    }
)


def run_in(folder: Path) -> RunFolder:
    return RunFolder(folder / "small" / "run")


def end_run(folder: Path) -> None:
    run_queue.submit(JOB, run_in(folder), at=1.0)
    run_queue.ask_to_stop(run_in(folder), at=0.0)
    run_queue.leave_outcome(run_in(folder), run_queue.Outcome(code=130, message="x"))


def resume_run(folder: Path) -> None:
    (found,) = run_queue.handed_over(folder).runs
    if found.outcome is not None:
        run_queue.take_up(found.run, at=2.0)


def queued(folder: Path) -> str:
    queue = run_queue.handed_over(folder)
    (found,) = queue.runs
    assert not queue.damaged
    if found.outcome is not None:
        return "ended"
    assert (found.request.at, found.stop, found.coordinator) == (2.0, False, None)
    return "wanted"


def ask_to_yield(folder: Path) -> None:
    run_queue.submit(JOB, run_in(folder), at=1.0, owner="ann")
    (found,) = run_queue.handed_over(folder).runs
    run_queue.note_start(found, 7, fruitless=1, at=10.0)
    run_queue.ask_to_yield(found.run)


def requeue(folder: Path) -> None:
    """As the service does again and again, until the run waits."""
    for action in run_queue.decide(run_queue.handed_over(folder).runs, {}, ()):
        assert isinstance(action, run_queue.Requeue)
        run_queue.requeue(action.handed, at=15.0)


def turn(folder: Path) -> str:
    queue = run_queue.handed_over(folder)
    (found,) = queue.runs
    assert not queue.damaged
    assert (found.outcome, found.request.owner) == (None, "ann")
    assert found.request.used in {0.0, 5.0}
    return "makes way" if found.yields else "waits"


def remember(number: int) -> Callable[[Path], object]:
    return lambda folder: FileMemory(folder).update("draws", lambda _: {"n": number})


def remembered(folder: Path) -> str:
    return str(FileMemory(folder).read("draws")["n"])


def enroll(folder: Path) -> None:
    made = enrolments.Federation(folder=folder)
    made.enroll(made.invite("site-a"))


def config_in(folder: Path) -> AggregatorConfig:
    file = AggregatorFile(listen="127.0.0.1:8443", hosts=("127.0.0.1",))
    return AggregatorConfig(file=file, folder=folder / "aggregator")


def revoke(folder: Path) -> None:
    enrolment_operator.revoke(
        config_in(folder), "site-a", unregister=lambda _: None, clock=ENROLLED
    )


def membership(folder: Path) -> str:
    """A site is on the list of the proxy before any other file has forgotten it."""
    place = folder / "aggregator"
    authority = Authority.load(place, clock=ENROLLED)
    book = BookFile(folder=place)
    is_member = book.read().member("site-a") is not None
    is_pinned = roster_file.pinned(place / "roster.toml", site="site-a") is not None
    if not book.read_revocations(authority).revoked:
        assert is_member
        assert is_pinned
        return "enrolled"
    return "listed" if is_member else "withdrawn" if is_pinned else "revoked"


def note(folder: Path) -> None:
    if len(audit_log.read(folder / audit_log.FILE).entries) < ROUNDS:
        audit_log.note(folder, "site.revoke", "one", at=2.0, who="ann")


def noted(folder: Path) -> str:
    found = audit_log.read(folder / audit_log.FILE)
    assert all("torn" in fault for fault in found.faults)
    return "torn" if found.faults else str(len(found.entries))


THINGS = {
    "audit log": Durable(
        lambda folder: audit_log.note(folder, "site.invite", "one", at=1.0, who="ann"),
        note,
        noted,
        ("torn", "1", "2"),
    ),
    "budget ledger": Durable(
        begin=lambda _: None,
        work=charge,
        look=charges,
        words=("new", "charged", "released", "whole"),
    ),
    "private steps": Durable(
        lambda _: None,
        interrupted,
        continued,
        ("nothing", "charged", "answered"),
        leaves=2,
        stride=7,
    ),
    "object of a folder": Durable(put(1), put(2), stored, ("1", "2")),
    "cached object": Durable(lambda _: None, cache, cached, ("0", "1")),
    "storage keys": Durable(
        begin=lambda folder: add_key(folder / "keys.toml"),
        work=two_keys,
        look=lambda folder: str(len(read_keys(folder / "keys.toml"))),
        words=("1", "2"),
    ),
    # Each of its writes is that of an object.
    "checkpoint": Durable(
        save_until(2), save_until(3), newest, ("2", "3"), leaves=20, stride=29
    ),
    "roster": Durable(
        trust("aggregator", "a"), trust("site-a", "b"), trusted, ("1", "2")
    ),
    "deployment's launches": Durable(launches(1), launches(2), launched, ("1", "2")),
    "queue of runs": Durable(end_run, resume_run, queued, ("ended", "wanted")),
    "turn of a run": Durable(ask_to_yield, requeue, turn, ("makes way", "waits")),
    "site's memory": Durable(remember(1), remember(2), remembered, ("1", "2")),
    "enrolled site": Durable(
        begin=enroll,
        work=revoke,
        look=membership,
        words=("enrolled", "listed", "withdrawn", "revoked"),
        stride=3,
    ),
}
