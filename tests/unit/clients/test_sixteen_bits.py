"""A site warns of a precision that is slow on its processor."""

import logging

import pytest
import torch

from clients import sixteen_bits
from federation.job.spec import TrainingSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_precision_is_warned_about_once_where_it_is_slow(
    precision: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """And not where it is fast."""
    training = TrainingSpec(precision=precision, local_steps=1)
    noted: set[str] = set()
    counts: list[int] = []
    with caplog.at_level(logging.WARNING):
        for is_fast in (True, False, False):
            monkeypatch.setattr(sixteen_bits, "_on_cpu", lambda _, fast=is_fast: fast)
            sixteen_bits.note_slow(training, CPU, noted)
            counts.append(len(caplog.records))
    assert counts == ([0, 0, 0] if precision == "fp32" else [0, 1, 1])
    assert all(f'"{precision}" is slow' in each.message for each in caplog.records)


def test_each_type_is_asked_about_by_its_own_name(monkeypatch: pytest.MonkeyPatch):
    """A processor may have one and not the other."""
    monkeypatch.setattr(sixteen_bits, "_on_cpu", lambda name: "bf16" in name)
    assert sixteen_bits.multiplies_bfloat16(CPU)
    assert not sixteen_bits.multiplies_float16(CPU)
