"""What the reader of a transcript shows of the protocol's messages."""

from dataclasses import fields, replace

import numpy as np
import pytest

from deploy.tools.transcript_bodies import decode, kind_of
from federation.errors import ProtocolError
from privacy.secagg.arithmetic.levels import LevelPlan
from privacy.secagg.protocol.train import TrainBody, read_train, write_train

BODY = TrainBody(
    setup_hash=bytes(range(32)), confirms=b"", certificate=b"c", update_clip=0.125
)


def test_every_field_of_a_task_is_shown():
    """What updates are clipped to among them, as a number."""
    data = write_train(BODY)
    assert kind_of(data) == "train"
    assert decode(data) == {
        "setup_hash": bytes(range(32)).hex(),
        "confirms": "",
        "certificate": b"c".hex(),
        "update_clip": 0.125,
        "plan": "none",
        "divisor": 0.0,
        "steps_by_site": [],
    }
    assert {field.name for field in fields(TrainBody)} == set(decode(data))
    assert read_train(data) == BODY


def with_clip(data: bytes, head: bytes) -> bytes:
    """Another clip norm: levels, steps and divisor follow it."""
    return data[:-32] + head + bytes(6) + data[-24:]


def test_levels_and_steps_of_a_task_are_shown():
    """The steps as the bytes that travel."""
    steps_b = np.array([0.5, 2.0], np.float32)
    plan = LevelPlan(levels=4, steps_b=steps_b)
    found = decode(write_train(replace(BODY, plan=plan, divisor=2.5)))
    assert found["plan.levels"] == 4
    assert found["plan.steps_b"] == "0000003f00000040"
    assert found["divisor"] == 2.5


def test_steps_of_all_sites_follow_the_task_and_are_shown():
    """Without them the task is as it was before there were any."""
    body = replace(BODY, steps_by_site=(3, 0, 12))
    data = write_train(body)
    begin = write_train(BODY)
    assert data == begin + b"".join(n.to_bytes(8, "big") for n in (3, 3, 0, 12))
    assert decode(data)["steps_by_site"] == [3, 0, 12]
    assert read_train(data) == body
    for wrong, text in (
        (begin + bytes(8), "steps_by_site is 0"),
        (begin + (65).to_bytes(8, "big") + bytes(8 * 65), "steps_by_site is 65"),
        (data[:-1], "inside steps_by_site"),
        (data + b"\0", "follow its end"),
    ):
        with pytest.raises(ProtocolError, match=text):
            decode(wrong)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-32], "update_clip"),
        (lambda data: with_clip(data, b"\x7f\xf0"), "update_clip"),
        (lambda data: with_clip(data, b"\x7f\xf8"), "update_clip"),
        (lambda data: with_clip(data, b"\xbf\xf0"), "clip norm of -1.0"),
        (lambda data: with_clip(data, bytes(2)), "clip norm of 0.0 is not positive"),
        (lambda data: data[:-8], "divisor"),
        (lambda data: data[:-8] + b"\xbf\xf0" + bytes(6), "divisor of -1.0"),
        (lambda data: data[:-8] + b"\x7f\xf8" + bytes(6), "divisor"),
        (lambda data: data[:-17] + b"\x04" + data[-16:], r"0 bytes .*steps of 4"),
        (lambda data: data[:-9] + b"\x04" + bytes(4) + data[-8:], "no steps of 0"),
        (lambda data: data + b"\x00", "inside count of steps_by_site"),
    ],
)
def test_task_without_sound_numbers_is_no_message(change, text: str):  # noqa: ANN001
    """Missing, infinite, no number, negative, zero, and one byte too many."""
    with pytest.raises(ProtocolError, match=text):
        decode(change(write_train(BODY)))
