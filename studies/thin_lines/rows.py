"""What a study measures, read from ``rows.toml``: rows, sizes, and the job of each.

A row is a job as a document, so whatever the job file can say can be a row.
"""

import copy
import hashlib
import json
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from federation.job import job_file

Keys = Mapping[str, Any]

# Values by which the rows of two files, versions of Python (whose library is the data)
# or sizes are apart.
_KEY_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way to train.

    Attributes:
        name: For people.
        learning_rates: Those that are tried with the first seed.
        local_steps: Steps of a site in a round; of no account to a synchronous row.
        work: How many times the steps of the size each site takes. Bytes are still
            compared with synchronous training of the size's own steps.
        synchronous: Whether gradients are averaged before each step of one optimiser.
        keys: Of the job, by dotted name.
    """

    name: str
    learning_rates: tuple[float, ...]
    local_steps: int = 1
    work: int = 1
    synchronous: bool = False
    keys: Keys = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large model and run are.

    Attributes:
        name: Its table in the file.
        steps: Steps of each site.
        warm_up_steps: Synchronous steps of the model that all rows start from.
        keys: Of the job, by dotted name.
    """

    name: str
    steps: int
    warm_up_steps: int
    keys: Keys = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All of a file, in one size.

    Attributes:
        job: Keys that all rows have in common, as nested tables.
    """

    job: Mapping[str, Any]
    size: Size
    rows: tuple[Row, ...]

    def steps(self, row: Row) -> int:
        """Steps of each site in a row."""
        return row.work * self.size.steps

    def document(self, row: Row, *, lr: float, seed: int) -> dict[str, Any]:
        """Return the job of a row, without the weights that it starts from."""
        steps = self.steps(row)
        rounds, rest = divmod(steps, row.local_steps)
        if rest:
            raise ValueError(
                f"{row.name!r} has rounds of {row.local_steps} steps, which do not "
                f"make {steps} steps: change either in the file of rows"
            )
        document = copy.deepcopy(dict(self.job))
        own = {
            "seed": seed,
            "rounds": rounds,
            "training.local_steps": row.local_steps,
            "training.optimizer.lr": lr,
            "evaluation.every": rounds,  # And the final model, which is evaluated.
        }
        for key, value in {**own, **self.size.keys, **row.keys}.items():
            job_file.override(document, key, value)
        return document

    def key(self, row: Row, *, lr: float, seed: int) -> str:
        """Return what a finished row is found by: a digest of all that decides."""
        decides = {
            "job": self.document(row, lr=lr, seed=seed),
            "synchronous": row.synchronous,
            "warm_up_steps": self.size.warm_up_steps,
            "library": platform.python_version(),
        }
        text = json.dumps(decides, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARACTERS]


def read(path: Path, size: str) -> Study:
    """Read a file of rows.

    Raises:
        ValueError: It has no such size, or two rows of one name.
    """
    document = tomllib.loads(path.read_text())
    if size not in document["sizes"]:
        known = ", ".join(document["sizes"])
        raise ValueError(f"{path} has no size {size!r}: it has {known}")
    rows = [
        Row(**{**row, "learning_rates": tuple(row["learning_rates"])})
        for row in document["rows"]
    ]
    names = [row.name for row in rows]
    double = {name for name in names if names.count(name) > 1}
    if double:
        raise ValueError(f"{path} has two rows called {min(double)!r}: rename one")
    return Study(
        job=document["job"],
        size=Size(name=size, **document["sizes"][size]),
        rows=tuple(rows),
    )
