"""What the reader of a transcript shows of the protocol's messages."""

from dataclasses import fields

import pytest

from deploy.tools.transcript_bodies import decode, kind_of
from federation.errors import ProtocolError
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
    }
    assert {field.name for field in fields(TrainBody)} == set(decode(data))
    assert read_train(data) == BODY


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-8], "update_clip"),
        (lambda data: data[:-8] + b"\x7f\xf0" + bytes(6), "update_clip"),
        (lambda data: data[:-8] + b"\x7f\xf8" + bytes(6), "update_clip"),
        (lambda data: data[:-8] + b"\xbf\xf0" + bytes(6), "clip norm of -1.0"),
        (lambda data: data[:-8] + bytes(8), "clip norm of 0.0 is not positive"),
        (lambda data: data + b"\x00", "follow its end"),
    ],
)
def test_task_without_a_sound_clip_norm_is_no_message(change, text: str):  # noqa: ANN001
    """Missing, infinite, no number, negative, zero, and one byte too many."""
    with pytest.raises(ProtocolError, match=text):
        decode(change(write_train(BODY)))
