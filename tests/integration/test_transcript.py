"""Everything that an aggregator sees in a whole run, read back as an auditor would.

The lists below are the claim: what is not on them must not leave a site.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.without_report import simulate

from cloud_adapters.local.transcript import FROM, TO
from deploy.tools import transcript_reader as transcript
from federation.job import job_file
from federation.messages import MaskedUpdate, RoundTask
from federation.wire import frame as wire

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
ROUNDS = {"secure": 4, "quickstart": 2}  # In every other round of `secure` one drops.
SITES = {"secure": 5, "quickstart": 2}
NUM_VALUES, NUM_SLOTS, WORD_BYTES = 29_066, 7, 4
FALSE_ALARM = 1e-9  # Of each statistical test, in a run without a fault.

# Header fields of each kind of message from a site: addresses, sizes, and the digest
# of names and shapes of the model that everybody has.
ADDRESS = {"run_id", "round_index", "site"}
HEADERS = {
    "masked-update": ADDRESS
    | {"layout_digest", "spent", "num_integers", "words_bytes", "body_bytes"}
    | {"based_on", "fragment"},
    "secure-answer": ADDRESS | {"step", "body_bytes"},
    "failure": ADDRESS | {"kind", "message"},
}
SECTIONS = {
    "masked-update": ["words", "header_h", "body"],
    "secure-answer": ["body"],
    "failure": [],
}
# What the body of each may be, and its decoded fields with the form of each.
DIGEST, SIGNATURE, KEY = r"[0-9a-f]{64}", r"[0-9a-f]{128}", r"[0-9a-f]{64}"
SHARE, BLOB = r"[0-9a-f]{66}", r"[\d,]+ bytes, sha256 [0-9a-f]{64}"
NUMBER, NUMBERS = r"[1-5]", r"\[[1-5](, [1-5])*\]"
ANSWERS = {"advertise": "advert", "confirm": "confirm", "survivors": "consent"}
ANSWERS |= {"reveal": "shares", "decline": "decline"}
BODIES = {
    "masked": {
        "head.number": NUMBER,
        "head.context": DIGEST,
        "head.vector_digest": DIGEST,
        "head.header_digest": DIGEST,
        "head.dealt": rf"{BLOB}|",  # None where no site may be missing.
        "head.signature": SIGNATURE,
        "sealed[]": BLOB,
        "rows[]": BLOB,
    },
    "advert": {
        "contract_hash": DIGEST,
        "number": NUMBER,
        "keys.mask": KEY,
        "keys.channel": KEY,
        "keys.kem": BLOB,
        "nonce": DIGEST,
        "signature": SIGNATURE,
    },
    "confirm": {
        "setup_hash": DIGEST,
        "number": NUMBER,
        "ciphertexts[]": BLOB,
        "signature": SIGNATURE,
    },
    "consent": {
        "number": NUMBER,
        "context": DIGEST,
        "survivors": NUMBERS,
        "signature": SIGNATURE,
    },
    "shares": {
        "number": NUMBER,
        "context": DIGEST,
        "self_shares[]": SHARE,
        "pair_shares[]": rf"{SHARE}|",  # Of one site that dropped out, or of none.
        "disputed": r"\[\]",
        "signature": SIGNATURE,
    },
    "decline": {"number": NUMBER, "context": DIGEST, "signature": SIGNATURE},
}


@pytest.fixture(scope="module")
def seen(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, list[dict[str, Any]]]]:
    """The transcript of a job, read by the product; each is run once."""

    @cache
    def of(name: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp(name) / "seen"
        job = job_file.load(JOBS / f"{name}.toml", [f"rounds={ROUNDS[name]}"])
        assert job.privacy.secure_aggregation.enabled
        assert simulate(job, transcript=folder).status == "completed"
        return folder, list(transcript.read(folder))

    return of


both = pytest.mark.parametrize("name", ROUNDS)


@both
def test_only_listed_fields_leave_a_site(name: str, seen: Any):
    """Neither examples, loss, norm nor any array but masked words and masked header."""
    _, rows = seen(name)
    heard = [row for row in rows if row["direction"] == FROM]
    # Setup, rounds and the last evaluation; a silent site is the grid's own word.
    assert {row["kind"] for row in heard} <= HEADERS.keys()
    masked = [row for row in heard if row["kind"] == "masked-update"]
    assert len(masked) >= (ROUNDS[name] + 1) * (SITES[name] - 1)
    for row in heard:
        assert row["clear"].keys() == HEADERS[row["kind"]]
        assert [part["name"] for part in row["sections"]] == SECTIONS[row["kind"]]
        assert not any(part["in_clear"] for part in row["sections"])
        check_header(row, trains=row["round"] <= ROUNDS[name])
        check_body(row)


def check_header(row: dict[str, Any], *, trains: bool) -> None:
    """Numbers in a header are sizes that follow from the model; texts are known."""
    clear = row["clear"]
    if row["kind"] == "failure":
        assert (clear["kind"], clear["message"]) == ("unreachable", "never answered")
    if row["kind"] == "masked-update":
        words, header, body = row["sections"]
        size = NUM_VALUES * WORD_BYTES if trains else 0
        assert (words["type"], words["count"]) == ("uint8", size)
        assert (header["type"], header["count"]) == ("uint64", NUM_SLOTS)
        assert clear["words_bytes"] == size
        assert clear["num_integers"] == NUM_SLOTS
        assert clear["body_bytes"] == body["bytes"]


def check_body(row: dict[str, Any]) -> None:
    """The canonical encoding of one message has these fields and room for no other."""
    for part in row["sections"]:
        if part["name"] != "body":
            assert part["fields"] == {}
            continue
        step = row["step"]
        assert part["message"] == ("masked" if step is None else ANSWERS[step])
        forms = BODIES[part["message"]]
        for field, value in part["fields"].items():
            form = forms[re.sub(r"\[\d+\]", "[]", field)]
            assert re.fullmatch(form, str(value)), (field, value)
        plain = {field for field in forms if not field.endswith("[]")}
        assert plain <= part["fields"].keys()


@both
def test_a_site_is_sent_the_global_model_in_clear_and_nothing_else(
    name: str, seen: Any
):
    """All sites of a round get the same, and all other bytes are the protocol's."""
    _, rows = seen(name)
    told = [row for row in rows if row["direction"] == TO]
    assert {row["kind"] for row in told} == {"task", "secure-task"}
    models: dict[int, set[tuple[str, ...]]] = {}
    for row in told:
        clear = {p["name"]: p["sha256"] for p in row["sections"] if p["in_clear"]}
        if row["kind"] == "secure-task":
            assert clear == {}
        else:
            assert clear.keys() == {"weights_d", "integers_m"}
            models.setdefault(row["round"], set()).add(tuple(clear.values()))
        for part in row["sections"]:
            assert part["in_clear"] or part["message"]
            assert part["in_clear"] or part["fields"]
    assert sorted(models) == list(range(1, ROUNDS[name] + 2))
    assert all(len(different) == 1 for different in models.values())


def masked_updates(folder: Path, rows: list[dict[str, Any]]) -> Iterator[MaskedUpdate]:
    for row in rows:
        if row["kind"] == "masked-update":
            message = wire.decode((folder / row["file"]).read_bytes())
            assert isinstance(message, MaskedUpdate)
            digest = hashlib.sha256(message.words.data).hexdigest()
            assert digest == row["sections"][0]["sha256"]
            yield message


def chi_square(data: np.ndarray) -> float:
    """Of bytes, against all 256 being equally likely; 255 degrees of freedom."""
    counts = np.bincount(data.view(np.uint8).ravel(), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2).sum() / expected)


def chi_square_range(false_alarm: float) -> tuple[float, float]:
    """Laurent and Massart (2000), lemma 1.

    With k degrees of freedom each side is left with a probability below exp(-x)::

        X >= k + 2 sqrt(k x) + 2 x,    X <= k - 2 sqrt(k x)
    """
    x, degrees = math.log(2 / false_alarm), 255
    spread = 2 * math.sqrt(degrees * x)
    return degrees - spread, degrees + spread + 2 * x


@both
def test_masked_words_are_uniform(name: str, seen: Any):
    """Each vector of each site, and what two of them differ by.

    Less than one run in 10^9 fails by chance: the rate is shared by all vectors.
    """
    folder, rows = seen(name)
    words = [m.words for m in masked_updates(folder, rows) if m.words.size]
    assert len(words) >= ROUNDS[name] * (SITES[name] - 1)
    values = [np.ascontiguousarray(w).view("<u4") for w in words]
    tested = values + [b - a for a, b in itertools.pairwise(values)]
    low, high = chi_square_range(FALSE_ALARM / len(tested))
    assert all(low < chi_square(v) < high for v in tested)
    # The test has teeth: a model in the clear does not pass, nor do its integers.
    task = next(row for row in rows if row["kind"] == "task")
    message = wire.decode((folder / task["file"]).read_bytes())
    assert isinstance(message, RoundTask)
    steps = np.rint(message.weights_d * (1 << 28)).astype("<i4")
    for plain in (message.weights_d, steps):
        assert chi_square(np.ascontiguousarray(plain)) > 100 * high


@both
def test_masked_headers_are_uniform(name: str, seen: Any):
    """Half of all bits are set, within Hoeffding's bound; no word comes twice.

    Counts of examples in the clear would leave nearly all of them unset.
    """
    folder, rows = seen(name)
    headers = np.concatenate([m.header_h for m in masked_updates(folder, rows)])
    bits = headers.size * 64
    ones = sum(int(value).bit_count() for value in headers)
    bound = math.sqrt(bits * math.log(2 / FALSE_ALARM) / 2)
    assert abs(ones - bits / 2) < bound < bits / 4
    assert np.unique(headers).size == headers.size  # But for n^2 / 2^65 < 1e-14.


def test_two_runs_have_no_masked_word_in_common(seen: Any, tmp_path: Path):
    """Same job and seed: keys come from the system's randomness and not from it."""
    folder, rows = seen("quickstart")
    job = job_file.load(JOBS / "quickstart.toml", ["rounds=1"])
    simulate(job, transcript=tmp_path / "again")
    again = list(transcript.read(tmp_path / "again"))
    first, second = (
        {m.site: m.words for m in masked_updates(*run) if m.round_index == 1}
        for run in ((folder, rows), (tmp_path / "again", again))
    )
    assert len(first) == len(second) == SITES["quickstart"]
    for site, words in first.items():
        same = words.view("<u4") == second[site].view("<u4")
        assert same.sum() <= 3  # 29,066 / 2^32 are expected; 4 come once in 10^22.
