"""Golden bytes: compare them with what the code makes, or write them anew.

``python tests/vectors/generate.py`` compares and exits 1 on a difference;
``--update-vectors`` writes. A difference means that old and new releases cannot
talk to each other: raise the format's version, and review the diff.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from federation.ids import RunId, SiteId
from federation.messages import (
    Energy,
    FailureKind,
    LedgerAnchor,
    MaskedUpdate,
    MetricSums,
    Phase,
    PrivacySpent,
    Resources,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.wire import frame as wire

WIRE_V2 = Path(__file__).with_name("wire_v2.json")

_RUN = RunId("20260102-030405-a1b2c3")
_SITE = SiteId("aws-us-east-1")
_DIGEST = "0123456789abcdef" * 4

WIRE_MESSAGES: dict[str, wire.WireMessage] = {
    "task": RoundTask(
        run_id=_RUN,
        round_index=3,
        site=_SITE,
        based_on=2,
        kind=TaskKind.TRAIN,
        layout_digest=_DIGEST,
        weights_d=np.array([1.0, -0.5, 3.25], dtype=np.float32),
        integers_m=np.array([-1, 2**40], dtype=np.int64),
        evaluate=True,
        evaluate_after=False,
        anchor=LedgerAnchor(train=2, evaluate=3),
    ),
    "round of secrets": RoundTask(
        run_id=_RUN,
        round_index=4,
        site=_SITE,
        based_on=3,
        kind=TaskKind.TRAIN,
        layout_digest=_DIGEST,
        weights_d=np.array([2.5], dtype=np.float32),
        integers_m=np.array([-2], dtype=np.int64),
        evaluate=False,
        evaluate_after=False,
        secure=b"\x00secret\xff",
    ),
    "update": SiteUpdate(
        run_id=_RUN,
        round_index=3,
        site=_SITE,
        based_on=2,
        layout_digest=_DIGEST,
        delta_d=np.array([0.0, float("inf"), -float("inf"), 1e-45], dtype=np.float32),
        integers_m=np.array([7], dtype=np.int64),
        num_examples=1234,
        num_steps=20,
        training=MetricSums(count=640, loss_sum=float("nan"), metrics={"correct": 320}),
        evaluation=MetricSums(count=100, loss_sum=12.1, metrics={"correct": 99}),
        evaluation_after=None,
        phases=(Phase(name="train", start_seconds=0.1, seconds=2.5),),
        resources=Resources(
            busy_seconds=2.75,
            cpu_seconds=5.5,
            peak_memory_bytes=2**31,
            method="process",
        ),
    ),
    "update with energy": SiteUpdate(
        run_id=_RUN,
        round_index=3,
        site=_SITE,
        layout_digest=_DIGEST,
        delta_d=np.array([0.5], dtype=np.float32),
        integers_m=np.array([7], dtype=np.int64),
        num_examples=1234,
        num_steps=20,
        training=None,
        evaluation=None,
        evaluation_after=None,
        phases=(),
        resources=Resources(
            busy_seconds=2.75,
            cpu_seconds=None,
            peak_memory_bytes=None,
            method="clock",
            energy=Energy(joules=(90.5, 99.25), grams=None, method="model"),
        ),
    ),
    "round in bf16": RoundTask(
        run_id=_RUN,
        round_index=4,
        site=_SITE,
        based_on=3,
        kind=TaskKind.TRAIN,
        layout_digest=_DIGEST,
        weights_d=np.array([0x3F80, 0xC040, 0x0001], dtype=np.uint16),
        integers_m=np.array([7], dtype=np.int64),
        evaluate=False,
        evaluate_after=False,
    ),
    "round of what changed": RoundTask(
        run_id=_RUN,
        round_index=4,
        site=_SITE,
        based_on=3,
        kind=TaskKind.TRAIN,
        layout_digest=_DIGEST,
        weights_d=np.array([0x3F80, 0x0000], dtype=np.uint16),
        integers_m=np.array([7], dtype=np.int64),
        evaluate=True,
        evaluate_after=False,
        changed_to="c4" * 32,
    ),
    "round of a sum": RoundTask(
        run_id=_RUN,
        round_index=4,
        site=_SITE,
        based_on=3,
        kind=TaskKind.TRAIN,
        layout_digest=_DIGEST,
        weights_d=np.array([0, 2**63, 2**64 - 1], dtype=np.uint64),
        integers_m=np.array([7], dtype=np.int64),
        evaluate=True,
        evaluate_after=False,
        secure=b"\x00secret\xff",
        changed_to="5e" * 32,
    ),
    "update in fp16": SiteUpdate(
        run_id=_RUN,
        round_index=4,
        site=_SITE,
        based_on=3,
        layout_digest=_DIGEST,
        delta_d=np.array([1.0, -65504.0, 6e-8], dtype=np.float16),
        integers_m=np.array([7], dtype=np.int64),
        num_examples=1234,
        num_steps=20,
        training=None,
        evaluation=None,
        evaluation_after=None,
        phases=(),
    ),
    "round after one that counted": RoundTask(
        run_id=_RUN,
        round_index=9,
        site=_SITE,
        based_on=8,
        kind=TaskKind.TRAIN,
        layout_digest=_DIGEST,
        weights_d=np.array([1.0, -2.0], dtype=np.float32),
        integers_m=np.array([7], dtype=np.int64),
        evaluate=False,
        evaluate_after=False,
        counted=7,
    ),
    "update in few bits": SiteUpdate(
        run_id=_RUN,
        round_index=9,
        site=_SITE,
        based_on=8,
        layout_digest=_DIGEST,
        delta_d=np.array([0x80, 0x3F, 0x7F, 0x09, 0x01], dtype=np.uint8),
        integers_m=np.array([7], dtype=np.int64),
        num_examples=1234,
        num_steps=20,
        training=None,
        evaluation=None,
        evaluation_after=None,
        phases=(),
    ),
    "private update": SiteUpdate(
        run_id=_RUN,
        round_index=3,
        site=_SITE,
        based_on=3,
        fragment=1,
        layout_digest=_DIGEST,
        delta_d=np.array([0.25], dtype=np.float32),
        integers_m=np.array([], dtype=np.int64),
        num_examples=0,
        num_steps=20,
        training=None,
        evaluation=None,
        evaluation_after=None,
        phases=(),
        spent=PrivacySpent(
            epsilon=1.25,
            delta=1e-5,
            held_out_epsilon=0.5,
            anchor=LedgerAnchor(train=3, evaluate=4),
        ),
    ),
    "evaluation": SiteEvaluation(
        run_id=_RUN,
        round_index=4,
        site=_SITE,
        based_on=2,
        evaluation=MetricSums(
            count=100, loss_sum=-float("inf"), metrics={"correct": 0}
        ),
        phases=(),
    ),
    "failure": SiteFailure(
        run_id=_RUN,
        round_index=4,
        site=_SITE,
        kind=FailureKind.CRASHED,
        message='RuntimeError: "no space left", 0 °C, \U0001f4be',
    ),
    "secure task": SecureTask(
        run_id=_RUN,
        round_index=0,
        site=_SITE,
        step=SecureStep.ADVERTISE,
        body=b"\x01\x00contract",
    ),
    "secure answer": SecureAnswer(
        run_id=_RUN,
        round_index=5,
        site=_SITE,
        step=SecureStep.REVEAL,
        body=b"",
    ),
    "masked update": MaskedUpdate(
        run_id=_RUN,
        round_index=5,
        site=_SITE,
        based_on=2,
        layout_digest=_DIGEST,
        words=np.array([1, 2, 3, 250, 251, 252], dtype=np.uint8),
        header_h=np.array([0, 2**63, 2**64 - 1], dtype=np.uint64),
        body=b"signed",
    ),
}


def wire_vectors() -> dict[str, str]:
    """Make the bytes of each message, in hexadecimal."""
    return {n: wire.encode_bytes(m).hex() for n, m in WIRE_MESSAGES.items()}


def main() -> int:
    """Compare or write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update-vectors", action="store_true")
    text = json.dumps(wire_vectors(), indent=2) + "\n"
    if parser.parse_args().update_vectors:
        WIRE_V2.write_text(text, encoding="ascii")
        return 0
    same = WIRE_V2.read_text(encoding="ascii") == text
    sys.stderr.write(f"{WIRE_V2.name}: {'same' if same else 'DIFFERENT'}\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
