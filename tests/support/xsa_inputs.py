"""What the frozen runs of secure aggregation begin with: terms, entropy, numbers.

``coefficients`` are what a site draws for sharing: for b_i, then for each k_ij in
the order of j, 48 bytes for each of t - 1 coefficients, highest degree first. Where
updates are in few levels, ``vectors`` are their digits as text, one for each value of
the padded vector, and ``task`` has what the digest of the task is made of.
"""

import hashlib
from typing import Any

import numpy as np

Json = dict[str, Any]

NUM_VALUES = 7  # 14, 21 and 28 bytes: no multiple of the cipher's block
PADDED = 4096  # Digits of as many values, in few levels.
SLOTS = ("weight", "loss", "hits")

_NO_PRIVACY = {
    "profile": "none",
    "mechanism": "",
    "noise_multiplier": 0.0,
    "sampling_rate": 0.0,
    "steps_per_round": 0,
    "delta": 0.0,
    "epsilon_cap": 0.0,
    "clip_norm": 0.0,
    "ring_noise_std": 0.0,
}
_RECORD_PRIVACY = {
    "profile": "record",
    "mechanism": "dp-sgd",
    "noise_multiplier": 1.1,
    "sampling_rate": 0.05,
    "steps_per_round": 20,
    "delta": 1e-5,
    "epsilon_cap": 3.0,
    "clip_norm": 0.7,
    "ring_noise_std": 0.0,
}


def _entropy(label: str, count: int) -> bytes:
    return hashlib.shake_256(f"xsa-v2 vectors/{label}".encode()).digest(count)


def _site_inputs(name: str, number: int, num_sites: int) -> Json:
    def draw(label: str, count: int) -> str:
        return _entropy(f"{name}/site {number}/{label}", count).hex()

    above = range(number + 1, num_sites + 1)
    return {
        "identity": draw("identity", 32),
        "mask": draw("mask", 32),
        "channel": draw("channel", 32),
        "kem_seed": draw("ML-KEM seed", 64),
        "nonce": draw("nonce", 32),
        "encapsulations": {str(j): draw(f"to {j}", 32) for j in above},
    }


def _round_inputs(name: str, terms: Json, index: int, drops: Json) -> Json:
    def draw(label: str, count: int) -> bytes:
        return _entropy(f"{name}/round {index}/{label}", count)

    numbers = range(1, len(terms["members"]) + 1)
    pool = 48 * (terms["threshold"] - 1) * len(numbers)
    amplitude = ((1 << (terms["ring_bits"] - 1)) - 1) // len(numbers)
    levels = terms["levels"]
    updates: Json = {}
    headers = {}
    for i in numbers:
        seed = int.from_bytes(draw(f"values {i}", 8), "big")
        rng = np.random.Generator(np.random.PCG64(seed))
        drawn = rng.integers(-amplitude, amplitude, NUM_VALUES, endpoint=True)
        # The corners: as large as the contract allows, and so for their sum.
        updates[str(i)] = [amplitude, -amplitude, 0, *map(int, drawn[3:])]
        if levels:
            digits = rng.integers(0, levels, PADDED)
            digits[:20], digits[20:40] = levels - 1, 0
            updates[str(i)] = "".join(map(str, digits))
        headers[str(i)] = [int(v) for v in rng.integers(-(2**32), 2**56, len(SLOTS))]
    step = np.frombuffer(draw("step", 4), "<u4")[0] / 2**40
    task: Json = {"task_digest": draw("task", 32).hex()}
    if levels:
        asked = {"asked": "train 1 0", "update_clip": terms["clip_norm"]}
        if "state" in drops:
            context = draw("state", 32).hex()
            asked["asked"] += f" counted {index - 1} state {drops['state']} {context}"
            asked["certificate"] = draw("certificate", 40).hex()
        steps = np.array([step], "<f4").tobytes().hex()
        more = {"levels": levels, "steps": steps, "divisor": 2.75}
        task = {"task": asked | more}
    return {
        "index": index,
        "model_digest": draw("model", 32).hex(),
        **task,
        "next_model_digest": draw("next model", 32).hex(),
        "declines": drops.get("declines", []),
        "silent": drops.get("silent", []),
        "no_consent": drops.get("no_consent", []),
        "no_shares": drops.get("no_shares", []),
        "self_masks": {str(i): draw(f"self mask {i}", 32).hex() for i in numbers},
        "coefficients": {
            str(i): draw(f"coefficients {i}", pool).hex() for i in numbers
        },
        "vectors": updates,
        "headers": headers,
    }


def _inputs(
    name: str,
    *,
    num_sites: int,
    threshold: int,
    bits: int,
    hybrid: bool,
    rounds: dict[int, Json],
    element_bound: float | None = None,
    privacy: Json | None = None,
    levels: int = 0,
) -> Json:
    terms = {
        "run_id": f"vectors-{name.lower()}",
        "code_hash": _entropy(f"{name}/code", 32).hex(),
        "layout_digest": _entropy(f"{name}/layout", 32).hex(),
        "job_digest": _entropy(f"{name}/job", 32).hex(),
        "num_values": NUM_VALUES,
        "roster_serial": 7,
        "aggregator_organisation": "Consortium office",
        "members": [[f"site-{i}", f"Hôpital {i}"] for i in range(1, num_sites + 1)],
        "threshold": threshold,
        "min_sites": min(3, num_sites),
        "ring_bits": bits,
        "clip_norm": 1.5,
        "element_bound": element_bound,
        "clip_elements": element_bound is not None,
        "weight_rule": "examples",
        "max_examples": 10_000,
        "max_rounds": 9,
        "header_slots": list(SLOTS),
        "hybrid": hybrid,
        "two_site_waiver": num_sites == 2,
        "differential_privacy": privacy or _NO_PRIVACY,
        "levels": levels,
        "fragments": 1,
    }
    return {
        "contract": terms,
        "aggregator": _entropy(f"{name}/aggregator", 32).hex(),
        "sites": [_site_inputs(name, i, num_sites) for i in range(1, num_sites + 1)],
        "rounds": [_round_inputs(name, terms, r, d) for r, d in rounds.items()],
    }


def xsa_inputs() -> dict[str, Json]:
    """The runs, by name: both settings, three rings, few levels, also the hybrid."""
    return {
        "P1-32": _inputs(
            "P1-32",
            num_sites=3,
            threshold=3,
            bits=32,
            hybrid=True,
            rounds={1: {}, 4: {}},
        ),
        "P1-24": _inputs(
            "P1-24", num_sites=4, threshold=4, bits=24, hybrid=False, rounds={1: {}}
        ),
        "P1-16": _inputs(
            "P1-16", num_sites=2, threshold=2, bits=16, hybrid=False, rounds={2: {}}
        ),
        "P2-32": _inputs(
            "P2-32",
            num_sites=4,
            threshold=3,
            bits=32,
            hybrid=True,
            rounds={1: {}, 3: {"silent": [2]}},
            element_bound=0.25,
            privacy=_RECORD_PRIVACY,
        ),
        "P2-24": _inputs(
            "P2-24",
            num_sites=4,
            threshold=3,
            bits=24,
            hybrid=False,
            rounds={1: {"declines": [4]}, 2: {"no_shares": [1]}},
        ),
        "P2-16": _inputs(
            "P2-16",
            num_sites=7,
            threshold=5,
            bits=16,
            hybrid=False,
            rounds={1: {"silent": [3], "no_consent": [7]}},
        ),
        "P1-L4": _inputs(
            "P1-L4",
            num_sites=4,
            threshold=4,
            bits=32,
            hybrid=False,
            rounds={1: {}},
            levels=4,
        ),
        "P2-L4": _inputs(
            "P2-L4",
            num_sites=4,
            threshold=3,
            bits=32,
            hybrid=True,
            rounds={2: {"silent": [3]}, 3: {"state": 2}},
            privacy=_RECORD_PRIVACY,
            levels=4,
        ),
    }
