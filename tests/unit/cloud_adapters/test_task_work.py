"""Work on a task that has come by another way than Flower's."""

import pytest
from support import toy

from cloud_adapters.transport.task_work import answer_frame
from federation.errors import ProtocolError
from federation.ids import RunId, SiteId
from federation.messages import (
    FailureKind,
    LeaveReason,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
)
from federation.rounds.failures import failure
from federation.vectors import Layout
from federation.wire import frame as wire

TASK, UPDATE = toy.task(SiteId("a")), toy.update(SiteId("a"))


class Site:
    """Answers with what a test says."""

    def __init__(self, answer: SiteMessage | Exception) -> None:
        self.says = answer

    def introduce(self, sealed: bytes) -> bytes:
        return sealed

    def answer(self, task: Task) -> SiteMessage:
        assert task.site == "a"
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def layout(self, run_id: RunId) -> Layout:
        raise AssertionError(run_id)  # Vectors have come with the task.


def test_answer_lasts_and_a_failure_does_not():
    """It may have passed when the same is asked again."""
    frame, lasts = answer_frame(Site(UPDATE), wire.encode_bytes(TASK), 5.0)
    found = wire.decode(frame)
    assert isinstance(found, SiteUpdate)
    assert found.delta_d.tobytes() == UPDATE.delta_d.tobytes()
    assert lasts
    failed = failure(TASK, FailureKind.BUDGET, "spent")
    frame, lasts = answer_frame(Site(failed), wire.encode_bytes(TASK), 5.0)
    assert wire.decode(frame) == failed
    assert not lasts


def test_error_is_a_failure_that_quotes_no_record():
    site = Site(ValueError("patient 7 has no pulse"))
    frame, lasts = answer_frame(site, wire.encode_bytes(TASK), 5.0)
    found = wire.decode(frame)
    assert isinstance(found, SiteFailure)
    assert found.kind is FailureKind.CRASHED
    assert "patient" not in found.message
    assert not lasts


def test_error_that_may_leave_is_in_the_sites_log_too(
    caplog: pytest.LogCaptureFixture,
):
    """Its operator is who can mend it."""
    text = "charges are missing"
    site = Site(ProtocolError(text, outside=text))
    frame, _ = answer_frame(site, wire.encode_bytes(TASK), 5.0)
    found = wire.decode(frame)
    assert isinstance(found, SiteFailure)
    assert text in found.message
    assert text in caplog.text


def test_site_that_leaves_says_so_in_its_answer():
    frame, _ = answer_frame(
        Site(UPDATE),
        wire.encode_bytes(TASK),
        5.0,
        leaves_after=lambda: LeaveReason.SPOT,
    )
    found = wire.decode(frame)
    assert isinstance(found, SiteUpdate)
    assert found.leaving is LeaveReason.SPOT


def test_notice_that_comes_during_the_work_is_in_the_answer():
    """The site is asked after its answer is made, and not before."""
    told: list[LeaveReason] = []

    class Warned(Site):
        def answer(self, task: Task) -> SiteMessage:
            told.append(LeaveReason.SPOT)
            return super().answer(task)

    frame, _ = answer_frame(
        Warned(UPDATE),
        wire.encode_bytes(TASK),
        5.0,
        leaves_after=lambda: told[0] if told else None,
    )
    found = wire.decode(frame)
    assert isinstance(found, SiteUpdate)
    assert found.leaving is LeaveReason.SPOT


def test_what_is_no_task_is_refused():
    with pytest.raises(ProtocolError, match=r"SiteUpdate in place .*a task"):
        answer_frame(Site(UPDATE), wire.encode_bytes(UPDATE), 5.0)
