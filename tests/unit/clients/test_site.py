"""A site's answers to tasks."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import toy

from clients.training.kept_steps import LeftAtStep
from clients.training.local_federation import state_of
from clients.training.site import Site, Work
from clients.training.site_state import SiteState
from clients.training.update import Form
from cloud_adapters.storage.disk.part_file import file_errors
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import SystemClock
from federation.compression import change
from federation.compression.codec import BF16, FP16, Codec, Links, decoded
from federation.errors import BudgetExceeded, ProtocolError, SiteError, UserCodeError
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.messages import (
    NO_ANCHOR,
    FailureKind,
    LedgerAnchor,
    MetricSums,
    RoundTask,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.protocols import LocalUpdate, LocalWeights
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Role, Vector
from federation.wire.frame import MAX_TEXT_CHARS

SITE = SiteId("a")
LAYOUT = Layout.build(
    [
        ("w", (2,), "float32", Role.PARAMETER),
        ("mine", (), "int64", Role.KEEP),
        ("count", (), "int64", Role.MAX),
    ]
)


def sums(loss: float):
    return MetricSums(count=2, loss_sum=loss, metrics={"correct": 1})


class AddOne:
    """A trainer that adds one to everything and notes what it was given."""

    def __init__(
        self,
        error: Exception | None = None,
        step: float = 1.0,
        *,
        carries: bool = False,
    ) -> None:
        self.error = error
        self.carries = carries
        self.kept: list[Arrays] = []
        self.step = np.float32(step)
        self.calls: list[str] = []

    def layout(self) -> Layout:
        return LAYOUT

    def pay(
        self,
        *,
        round_index: int,
        trains: bool,
        evaluations: int,
        anchor: LedgerAnchor = NO_ANCHOR,
        steps: int = 0,
    ) -> None:
        pass

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
    ) -> Any:
        self.calls.append(f"round {round_index} {integers_m.tolist()}")
        if self.error is not None:
            raise self.error
        self.kept.append(kept)
        return LocalWeights(
            weights_d=weights_d + self.step,
            integers_m=integers_m + 1,
            num_examples=3,
            num_steps=4,
            training=sums(9.0),
            kept={"optimizer/w": np.full(2, round_index)} if self.carries else {},
        )

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,  # noqa: ARG002 -- of the seam
    ) -> MetricSums:
        self.calls.append(f"evaluate {round_index} {integers_m.tolist()}")
        return sums(float(weights_d.sum()))

    def spent(self):
        return None


@pytest.fixture
def store():
    return MemoryStore()


def site_of(trainer: AddOne, store: MemoryStore, links: Links | None = None):
    return Site(
        SITE,
        make_trainer=lambda: trainer,
        state=SiteState(SITE, LAYOUT, store, carries="adam" if trainer.carries else ""),
        clock=SystemClock(),
        links=links or Links(),
    )


def task(kind: TaskKind = TaskKind.TRAIN, **changes: Any):
    weights_d, integers_m = np.ones(2, np.float32), np.array([10, 20])
    weights_d.flags.writeable = integers_m.flags.writeable = False
    fields: dict[str, Any] = {
        "run_id": RunId("run"),
        "round_index": 5,
        "site": SITE,
        "kind": kind,
        "layout_digest": LAYOUT.digest,
        "weights_d": weights_d,
        "integers_m": integers_m,
        "evaluate": False,
        "evaluate_after": False,
    }
    return RoundTask(**fields | changes)


@pytest.mark.parametrize("codec", [FP16, BF16], ids=lambda codec: codec.name)
def test_model_and_update_travel_in_words_of_a_codec(store: MemoryStore, codec: Codec):
    """The update is what training added to the model that arrived."""
    sent_d = np.float32([1.001, -3.14159])
    words, trainer = codec.encode(sent_d), AddOne(step=0.3)
    site = site_of(trainer, store, Links(up=codec, down=codec))
    answer = site.handle(task(weights_d=words, evaluate=True))
    assert isinstance(answer, SiteUpdate)
    arrived_d = decoded(codec, words)
    expected_d = codec.encode((arrived_d + np.float32(0.3)) - arrived_d)
    assert answer.delta_d.dtype == codec.dtype
    assert answer.delta_d.tobytes() == expected_d.tobytes()
    assert answer.evaluation == sums(float(arrived_d.sum()))


@pytest.mark.parametrize("codec", [FP16, BF16], ids=lambda codec: codec.name)
def test_model_in_words_of_another_codec_is_refused(store: MemoryStore, codec: Codec):
    """Nothing is trained."""
    trainer = AddOne()
    answer = site_of(trainer, store).handle(
        task(weights_d=codec.encode(np.ones(2, "f4")))
    )
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.INVALID
    assert f"model of type {codec.dtype}" in answer.message
    assert trainer.calls == []
    answer = site_of(trainer, store, Links(down=codec)).handle(task())
    assert isinstance(answer, SiteFailure)
    assert "model of type float32" in answer.message


def change_task(words: list[float], result: list[float], **changes: Any):
    """A task with what changed, and the model that should come of it."""
    after = change.digest(np.float32(result))
    changes = {"based_on": 4, **changes}
    return task(weights_d=np.float32(words), changed_to=after, **changes)


def test_a_site_adds_what_changed_to_the_model_that_it_has(store: MemoryStore):
    """Also when the same task comes twice, and when it only evaluates."""
    site = site_of(AddOne(), store, Links(changes=True))
    first = task()
    site.handle(first)
    first.weights_d.flags.writeable = True
    first.weights_d[:] = 7  # Its memory is the sender's again.
    one = change_task([0.5, -0.5], [1.5, 0.5], kind=TaskKind.EVALUATE)
    for _ in range(2):
        answer = site.handle(one)
        assert isinstance(answer, SiteEvaluation)
        assert answer.evaluation == sums(2.0)
    answer = site.handle(change_task([1.0, 1.0], [2.5, 1.5], evaluate=True))
    assert isinstance(answer, SiteUpdate)
    assert answer.evaluation == sums(4.0)


def test_a_change_of_a_model_that_is_not_there_is_refused(store: MemoryStore):
    """After a restart, or if it is not what came out at the aggregator."""
    trainer = AddOne()
    site = site_of(trainer, store, Links(changes=True))
    fitting = change_task([0.5, -0.5], [1.5, 0.5])
    for first, text in (
        (fitting, "it was restarted"),
        (task(), ""),
        (change_task([0.5, -0.5], [1.5, 0.75]), "has a different model"),
        (fitting, "it was restarted"),
        (task(), ""),
        (fitting, ""),
        (change_task([1.0], [2.5, 1.5]), "1 words of identity are"),
    ):
        answer = site.handle(first)
        assert isinstance(answer, SiteFailure) == bool(text)
        if isinstance(answer, SiteFailure):
            assert text in answer.message
            kind = "invalid" if "words" in text else "not_set_up"
            assert answer.kind.value == kind
    assert len(trainer.calls) == 3


def test_update_beyond_the_codec_does_not_leave(store: MemoryStore):
    """It would be infinite at the other end."""
    site = site_of(AddOne(step=65520.0), store, Links(up=FP16))
    answer = site.handle(task(weights_d=np.zeros(2, np.float32)))
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.NOT_FINITE
    assert "a value of magnitude 65520 does not fit into fp16" in answer.message
    site = site_of(AddOne(step=65504.0), store, Links(up=FP16))
    assert isinstance(site.handle(task(weights_d=np.zeros(2, np.float32))), SiteUpdate)


def test_a_training_task_gives_an_update(store: MemoryStore):
    """Local minus global, with everything that the server counts by."""
    answer = site_of(AddOne(), store).handle(task())
    assert isinstance(answer, SiteUpdate)
    assert answer.delta_d.tolist() == [1, 1]
    assert (answer.num_examples, answer.num_steps) == (3, 4)
    assert (answer.site, answer.round_index, answer.run_id) == (SITE, 5, "run")
    assert (answer.evaluation, answer.evaluation_after) == (None, None)
    assert answer.training == sums(9.0)


def test_kept_integers_stay_at_the_site(store: MemoryStore):
    """They do not travel, and the next round gets them back."""
    trainer = AddOne()
    site = site_of(trainer, store)
    answer = site.handle(task())
    assert isinstance(answer, SiteUpdate)
    assert answer.integers_m.tolist() == [0, 21]
    site.handle(task(round_index=6))
    site.handle(task(TaskKind.EVALUATE, round_index=6))
    assert trainer.calls == [
        "round 5 [10, 20]",
        "round 6 [11, 20]",
        "evaluate 6 [11, 20]",
    ]


def test_what_training_keeps_comes_back_in_the_next_round(store: MemoryStore):
    """With the site's integers, also after a restart; a round that is repeated begins
    where it began before. It never leaves."""
    first, second = AddOne(carries=True), AddOne(carries=True)
    for trainer, rounds in ((first, (1, 2)), (second, (2, 3))):
        site = site_of(trainer, store)
        for round_index in rounds:
            answer = site.handle(task(round_index=round_index))
            assert isinstance(answer, SiteUpdate)
            assert answer.integers_m.tolist() == [0, 21]
    began = [
        {name: array.tolist() for name, array in kept.items()}
        for kept in first.kept + second.kept
    ]
    after_1 = {"integers": [11, 0], "optimizer/w": [1, 1]}
    after_2 = {"integers": [12, 0], "optimizer/w": [2, 2]}
    assert began == [{}, after_1, after_1, after_2]


def test_another_layout_is_refused(store: MemoryStore):
    """Before anything is trained."""
    trainer = AddOne()
    answer = site_of(trainer, store).handle(task(layout_digest="0" * 64))
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.INVALID
    assert trainer.calls == []


@pytest.mark.parametrize(
    "asked",
    [
        task(secure=b"contract"),
        task(TaskKind.EVALUATE, secure=b"contract"),
        SecureTask(
            run_id=RunId("run"),
            round_index=0,
            site=SITE,
            step=SecureStep.ADVERTISE,
            body=b"",
        ),
    ],
)
def test_a_plain_site_gives_nothing_to_secure_aggregation(
    asked: Any, store: MemoryStore
):
    """It says so, and above all does not answer in the clear."""
    trainer = AddOne()
    answer = site_of(trainer, store).handle(asked)
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.INVALID
    assert answer.message.startswith("was asked for secure aggregation")
    assert (answer.site, answer.round_index) == (SITE, asked.round_index)
    assert trainer.calls == []


@pytest.mark.parametrize("step", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_a_failure(step: float, store: MemoryStore):
    """And nothing of the spoilt training is kept."""
    answer = site_of(AddOne(step=step), store).handle(task())
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.NOT_FINITE
    assert list(store.list()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SiteError("no data"), "no data"),
        (ValueError("two\nlines\t\x1b[31m"), "ValueError: two lines  [31m"),
        (KeyError("x" * 2000), "KeyError: 'x"),
    ],
)
def test_an_error_becomes_one_line(error: Exception, expected: str, store: MemoryStore):
    """Of bounded length, that may be shown on a terminal."""
    answer = site_of(AddOne(error), store).handle(task())
    assert isinstance(answer, SiteFailure)
    assert answer.kind is FailureKind.CRASHED
    assert answer.message.startswith(expected)
    assert len(answer.message) <= MAX_TEXT_CHARS
    assert answer.message.isprintable()


def test_a_deployed_site_tells_the_kind_of_an_error_alone(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
):
    """Its text may quote a record: it is in the site's log. Errors of ours do not,
    if our own code raises them."""
    for error, told in (
        (ValueError("record 17 of J. Doe"), "ValueError"),
        (SiteError("record 19 of J. Doe"), "SiteError"),  # Raised by no code of ours.
        (
            UserCodeError("mine:loss", KeyError("record 18 of J. Doe"), " (mine.py)"),
            "mine:loss failed with KeyError (mine.py)",
        ),
    ):
        state = SiteState(SITE, LAYOUT, store)
        site = Site(
            SITE,
            make_trainer=lambda error=error: AddOne(error),
            state=state,
            clock=SystemClock(),
            tells_all=False,
        )
        answer = site.handle(task())
        assert isinstance(answer, SiteFailure)
        assert answer.kind is FailureKind.CRASHED
        assert answer.message == told
    assert "record 17 of J. Doe" in caplog.text
    assert "record 18 of J. Doe" in caplog.text
    assert "record 19 of J. Doe" in caplog.text


def test_a_full_disk_is_one_line_and_names_no_folder_outside(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
):
    """Each round fails until there is space: a traceback would say nothing more."""

    def make_trainer() -> AddOne:
        with file_errors("write", Path("/srv/site/x")):
            raise OSError(errno.ENOSPC, "No space left on device")

    state = SiteState(SITE, LAYOUT, store)
    site = Site(
        SITE,
        make_trainer=make_trainer,
        state=state,
        clock=SystemClock(),
        tells_all=False,
    )
    answer = site.handle(task())
    assert isinstance(answer, SiteFailure)
    assert "/srv" not in answer.message
    assert "No space left" in answer.message
    record = caplog.records[-1]
    assert record.exc_info is None
    assert " failed: cannot write '/srv/site/x': the disk" in record.getMessage()


def test_a_site_that_leaves_says_so_in_one_line(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
):
    """A supervisor has stopped it: nothing went wrong, and there is no traceback."""
    site = site_of(AddOne(LeftAtStep("its 24 steps are kept")), store)
    assert isinstance(site.handle(task()), SiteFailure)
    record = caplog.records[-1]
    assert (record.getMessage(), record.exc_info) == ("its 24 steps are kept", None)


def test_a_failed_start_is_tried_again(store: MemoryStore):
    """A site whose data was out of reach joins in once it is there."""
    trainers = iter([SiteError("no disk"), AddOne()])

    def make() -> AddOne:
        made = next(trainers)
        if isinstance(made, Exception):
            raise made
        return made

    state = SiteState(SITE, LAYOUT, store)
    site = Site(SITE, make_trainer=make, state=state, clock=SystemClock())
    answers = [site.handle(task()) for _ in range(3)]
    assert [type(a) for a in answers] == [SiteFailure, SiteUpdate, SiteUpdate]


@pytest.mark.parametrize(
    ("place", "answer_type"),
    [
        ({"round_index": 1}, SiteFailure),
        # No honest aggregator says so.
        ({"round_index": 1, "based_on": 7}, SiteFailure),
        ({"round_index": 3, "based_on": 0}, SiteFailure),
        ({"round_index": 2, "based_on": 1}, SiteUpdate),
    ],
)
def test_the_first_model_is_compared_with_the_jobs(
    place: dict[str, int], answer_type: type, store: MemoryStore
):
    """Before anything is trained; later ones are the aggregator's to say."""

    def refuse(weights_d: Vector, integers_m: IntegerVector) -> None:
        raise ProtocolError(f"different weights: {weights_d}")

    trainer = AddOne()
    site = site_of(trainer, store)
    site.check_first = refuse
    answer = site.handle(task(**place))
    assert type(answer) is answer_type
    if isinstance(answer, SiteFailure):
        assert answer.kind is FailureKind.INVALID
        assert "different weights" in answer.message


def test_a_change_is_no_first_model(store: MemoryStore):
    """It could turn the weights of the job into any others."""
    site = site_of(AddOne(), store, Links(changes=True))
    site.handle(task())
    answer = site.handle(change_task([0.5, -0.5], [1.5, 0.5], based_on=0))
    assert isinstance(answer, SiteFailure)
    assert "not a whole one" in answer.message


def work_of(trainer: AddOne, store: MemoryStore, error: Exception) -> Work:
    """The work of a round in which training fails."""
    trainer.error = error
    return site_of(trainer, store)._work(task())


class AsItIs(Form[LocalWeights | LocalUpdate]):
    """What training gave."""

    def update(
        self, _weights_d: Vector, result: LocalWeights | LocalUpdate
    ) -> LocalWeights | LocalUpdate:
        return result


@pytest.mark.parametrize(
    "error", [UserCodeError("mine:net", ValueError("record 7")), IndexError("record 7")]
)
def test_training_that_fails_is_an_update_of_zero_where_noise_is_added(
    error: Exception, store: MemoryStore
):
    """Whether it fails depends on the records, and a decline has no noise."""
    work = work_of(AddOne(), store, error)
    with pytest.raises(type(error)):
        work.do(AsItIs())
    work.answers_anyway = True
    done = work.do(AsItIs())
    assert done.trained is not None
    assert isinstance(done.trained.sealed, LocalWeights)
    assert done.trained.sealed.weights_d.tolist() == [1, 1]
    assert done.trained.num_steps == 0


@pytest.mark.parametrize(
    "error", [LeftAtStep("leaves"), BudgetExceeded("spent"), ProtocolError("lies")]
)
def test_what_records_do_not_decide_is_refused_also_where_noise_is_added(
    error: Exception, store: MemoryStore
):
    """The site leaves, or the job, the ledger or the aggregator is the reason."""
    work = work_of(AddOne(), store, error)
    work.answers_anyway = True
    with pytest.raises(type(error)):
        work.do(AsItIs())


def auto_job() -> JobSpec:
    """A job whose rounds take from 2 to 9 local steps."""
    return toy.job(
        {
            "rounds": 20,
            "training": {"local_steps": 2},
            "schedule": {"local_work": "auto", "max_local_steps": 9},
        }
    )


class ChosenSteps(AddOne):
    """A trainer that takes the steps that it is asked for."""

    def fit(self, *given: Any, **options: Any) -> Any:
        steps = options.pop("steps")
        self.calls.append(f"steps {steps.start} to {steps.stop}")
        return super().fit(*given, **options)


def test_no_site_takes_steps_of_a_run_again(store: MemoryStore):
    """Unless the same round is repeated; also after a restart."""
    job = auto_job()

    def asked(round_index: int, first: int) -> str:
        site = Site(
            SITE,
            make_trainer=ChosenSteps,
            state=state_of(job, LAYOUT, SITE, store),
            clock=SystemClock(),
        )
        answer = site.handle(
            task(round_index=round_index, num_steps=4, first_step=first)
        )
        return answer.message if isinstance(answer, SiteFailure) else ""

    assert asked(1, 0) == asked(2, 4) == asked(2, 4) == ""
    assert "to begin at step 4 of the run" in asked(3, 4)
    assert asked(3, 8) == ""
    assert asked(2, 4) == ""  # A coordinator that resumed from an earlier checkpoint.
