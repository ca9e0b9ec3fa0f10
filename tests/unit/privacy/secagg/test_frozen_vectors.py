"""Whole runs are, byte for byte, what was frozen and what another program makes."""

import hashlib
import json
from typing import Any

import pytest
from support import xsa_reference
from support.xsa_inputs import xsa_inputs
from support.xsa_product import product_trace
from vectors.generate_xsa import XSA_V2

FROZEN = json.loads(XSA_V2.read_text(encoding="ascii"))
STEPS = ("declines", "silent", "no_consent", "no_shares")
EVERY_RUN = pytest.mark.parametrize("name", sorted(FROZEN))


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by their path, so that a difference names its step."""
    if not isinstance(value, dict | list):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        leaf: found
        for key, inner in items
        for leaf, found in flat(inner, f"{path}/{key}").items()
    }


def test_frozen_runs_are_those_of_the_generator():
    """No run was left behind, and none has other inputs than are written there."""
    assert {name: run["inputs"] for name, run in FROZEN.items()} == xsa_inputs()


@EVERY_RUN
def test_product_makes_the_frozen_bytes(name: str):
    """From the contract to the sum: every message, digest, secret and masked word."""
    run = FROZEN[name]
    assert flat(run["trace"]) == flat(product_trace(run["inputs"]))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name != "P1-16" else [])
        for name in sorted(FROZEN)
    ],
)
def test_second_implementation_makes_the_frozen_bytes(name: str):
    """A program that shares no code with the product, written from its documents.

    Plain Python is slow; ``make check`` plays one run, as only that program can differ.
    """
    run = FROZEN[name]
    assert flat(run["trace"]) == flat(xsa_reference.play(run["inputs"]))


@EVERY_RUN
def test_frozen_sums_are_those_of_the_survivors(name: str):
    """What was frozen is right: plain integers, added in Python."""
    run = FROZEN[name]
    for given, trace in zip(
        run["inputs"]["rounds"], run["trace"]["rounds"], strict=True
    ):
        for part in ("vector", "header"):
            rows = [
                row
                for number, row in given[f"{part}s"].items()
                if int(number) not in given["silent"] + given["declines"]
            ]
            expected: Any = [
                sum(map(int, column)) for column in zip(*rows, strict=True)
            ]
            if isinstance(trace[f"{part}_sum"], str):  # Digits, one byte each.
                expected = bytes(expected).hex()
            assert expected == trace[f"{part}_sum"]


def test_frozen_runs_cover_both_settings_and_every_ring():
    """With dropouts after every exchange, with the hybrid and without it."""
    kinds, lost = set(), set()
    for run in FROZEN.values():
        terms = run["inputs"]["contract"]
        several = terms["threshold"] < len(terms["members"])
        width = f"L{terms['levels']}" if terms["levels"] else terms["ring_bits"]
        kinds |= {("P2" if several else "P1", width), terms["hybrid"]}
        for given in run["inputs"]["rounds"]:
            lost |= {step for step in STEPS if given[step]}
    rings = {(p, b) for p in ("P1", "P2") for b in (16, 24, 32, "L4")}
    assert kinds == rings | {True, False}
    assert lost == set(STEPS)


@EVERY_RUN
def test_digests_are_of_the_frozen_messages(name: str):
    """h_Q and h_U can be recomputed from the file with a hash function alone."""
    trace = FROZEN[name]["trace"]
    contract = bytes.fromhex(trace["contract"])
    assert trace["contract_hash"] == hashlib.sha256(contract).hexdigest()
    book = len(b"xsa-v2/book").to_bytes(8, "big") + b"xsa-v2/book"
    book += len(trace["adverts"]).to_bytes(8, "big")
    for number, text in sorted(trace["adverts"].items(), key=lambda e: int(e[0])):
        advert = bytes.fromhex(text)
        book += int(number).to_bytes(8, "big") + len(advert).to_bytes(8, "big") + advert
    assert trace["setup_hash"] == hashlib.sha256(book).hexdigest()
