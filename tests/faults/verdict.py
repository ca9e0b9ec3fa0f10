"""Whether a run that something befell is still right.

Reads what a run has left on disk, and starts nothing. Each check returns what is wrong,
in words; nothing is the verdict that all is well.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from deploy.tools.ledger_reader import examine

Event = Mapping[str, Any]
Weights = NDArray[np.float32]  # All values of a model, shape (d,).

COMPLETED = "completed"
# Of the length of all weights: what is left of float32 when two ranks add up.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run has left, and what the person saw who waited for it.

    Attributes:
        folder: Its folder at the aggregator.
        code: Exit code of ``crossfed run``.
        words: What that wrote for people.
        events: Of all coordinators of the run.
    """

    folder: Path
    code: int
    words: str
    events: Sequence[Event]

    @property
    def run_id(self) -> str:
        return str(next(self.of("RunStarted"))["run_id"])

    @property
    def last_round(self) -> int:
        return max((int(r) for r in self.rounds()), default=0)

    def of(self, kind: str) -> Iterator[Event]:
        """Events of a kind."""
        return (event for event in self.events if event["event"] == kind)

    def rounds(self) -> dict[int, Event]:
        """How each round ended; where two coordinators ended one, the later counts."""
        return {event["round_index"]: event for event in self.of("RoundFinished")}

    def lost(self) -> list[int]:
        """Rounds without a result."""
        return [i for i, event in self.rounds().items() if event["status"] != COMPLETED]

    def missing(self) -> dict[str, list[int]]:
        """Rounds by site in whose result it is not, though others are."""
        found: dict[str, list[int]] = {}
        for index, event in self.rounds().items():
            if event["status"] == COMPLETED:
                for site in set(event["asked"]) - set(event["answered"]):
                    found.setdefault(site, []).append(index)
        return found

    def weights(self) -> Weights:
        """The model of the newest checkpoint."""
        newest = max(self.manifests())
        return flat(load_file(self.folder / "checkpoints" / self._key(newest)))

    def manifests(self) -> list[int]:
        """Rounds after which a checkpoint was saved."""
        found = (self.folder / "checkpoints").glob("round-*.json")
        return sorted(int(path.stem.partition("-")[2]) for path in found)

    def model_digest(self, index: int) -> str:
        """Digest of the model after a round."""
        return self._key(index)

    def _key(self, index: int) -> str:
        path = self.folder / "checkpoints" / f"round-{index:06}.json"
        return str(json.loads(path.read_text())["blobs"]["weights"]["key"])


def flat(weights: Mapping[str, NDArray[Any]]) -> Weights:
    """All values of a model, shape (d,), in the order of their names."""
    return np.concatenate([weights[name].reshape(-1) for name in sorted(weights)])


def check_end(run: Run, advice: str) -> Iterator[str]:
    """It is completed, or it has said what to do."""
    if "Traceback" in run.words:
        yield f"the person who waited was shown a traceback: {run.words[-300:]}"
    if run.code == 0:
        return
    said = run.words.strip().splitlines()[-1:] or ["nothing"]
    if not advice:
        yield f"it ended with {run.code}: {said[0]}"
    elif advice not in run.words:
        yield f"it ended with {run.code} and without {advice!r}: {said[0]}"


def check_rounds(run: Run) -> Iterator[str]:
    """No round counts twice: each has one checkpoint, and changes the model once."""
    rounds, manifests = run.rounds(), run.manifests()
    if manifests != list(range(manifests[-1] + 1)):
        yield f"there are checkpoints of the rounds {manifests}"
        return
    unsaved = sorted(set(rounds) - set(manifests))
    if unsaved and not (run.code and unsaved == [run.last_round]):
        yield f"there are no checkpoints of the rounds {unsaved}"
    for index in sorted(set(rounds) & set(manifests)):
        is_new = run.model_digest(index) != run.model_digest(index - 1)
        if is_new != (rounds[index]["status"] == COMPLETED):
            verb = "changed" if is_new else "did not change"
            yield f"round {index}, {rounds[index]['status']}, {verb} the model"
    for index, event in rounds.items():
        twice = [site for site, n in Counter(event["answered"]).items() if n > 1]
        if twice:
            yield f"round {index} counts {twice} twice"
    yield from _check_result(run)


def _check_result(run: Run) -> Iterator[str]:
    if run.code:
        return
    result = json.loads((run.folder / "result.json").read_text())
    completed = sum(event["status"] == COMPLETED for event in run.rounds().values())
    if result["rounds_completed"] != completed:
        yield f"it says {result['rounds_completed']} rounds, and {completed} were"


def check_secrets(run: Run) -> Iterator[str]:
    """In secret, a site answers a round once: two sums would give updates away."""
    if not next(run.of("RunStarted"))["secure_aggregation"]:
        return
    answers = Counter((e["site"], e["round_index"]) for e in run.of("SiteAnswered"))
    for (site, index), number in answers.items():
        if number > 1:
            yield f"{site} answered round {index} {number} times"


def check_ledgers(run: Run, ledgers: Mapping[str, Path]) -> Iterator[str]:
    """What left a site is on its ledger, and no round of it is there twice."""
    for site, path in ledgers.items():
        found = examine(path)
        if found.contents is None:
            yield f"the ledger of {site}: {found.error}"
            continue
        charges = Counter(
            charge.round_index
            for charge in found.contents.charges
            if charge.purpose == "train"
        )
        released = {
            e["round_index"] for e in run.of("SiteAnswered") if e["site"] == site
        }
        if released - set(charges):
            yield f"{site} released {released - set(charges)}, which are not charged"
        twice = [index for index, number in charges.items() if number > 1]
        if twice:
            yield f"the ledger of {site} has the rounds {twice} more than once"


def check_bits(found: Weights, wanted: Weights) -> Iterator[str]:
    """In the clear: bit for bit the model of the run that lost the same on purpose."""
    if found.tobytes() != wanted.tobytes():
        distance = _distance(found, wanted)
        yield f"the model is not that of the replay: {distance:.3g} away"


def check_closeness(found: Weights, first: Weights, second: Weights) -> Iterator[str]:
    """As close to a replay as two replays are to each other.

    They differ by what is rounded at random: see ``docs/explanation/determinism.md``.
    """
    allowed = 3 * _distance(first, second) + ROUNDING * float(np.linalg.norm(first))
    distance = _distance(found, first)
    if not distance <= allowed:
        yield f"the model is {distance:.3g} from the replay; {allowed:.3g} are right"


def check_power(run: Run, first: Weights, second: Weights) -> Iterator[str]:
    """One round more or less would have been seen by ``check_closeness``."""
    allowed = 3 * _distance(first, second) + ROUNDING * float(np.linalg.norm(first))
    steps = [
        e["update_norm"] for e in run.rounds().values() if e["status"] == COMPLETED
    ]
    if steps and min(steps) < 10 * allowed:
        yield f"a round of {min(steps):.3g} would not be seen: {allowed:.3g} pass"


def _distance(one: Weights, other: Weights) -> float:
    return float(np.linalg.norm(one.astype(np.float64) - other))
