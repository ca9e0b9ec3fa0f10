"""Accuracy by what a record has: of the joint model, and of a site that trains alone.

``python compare.py`` trains both and prints a row for each kind of record.
"""

import tomllib
from pathlib import Path

import numpy as np
import torch
import work

import crossfed

JOB = Path(__file__).with_name("job.toml")
KINDS = (("image",), ("words",), ("image", "words"))


def alone(site: int) -> crossfed.RunResult:
    """Train the job with one of its sites, which needs no secure aggregation."""
    table = tomllib.loads(JOB.read_text())["sites"][site]
    changes = {"sites": [table], "privacy.secure_aggregation": None}
    return crossfed.simulate(JOB, changes)


def accuracy(result: crossfed.RunResult, has: tuple[str, ...]) -> float:
    """Share of correct classes among all held-out digits, with some views only."""
    model = work.net()
    model.load_state_dict(result.state_dict())
    _, held_out = work.views(has=has)
    inputs = {name: torch.from_numpy(rows) for name, rows in held_out.inputs.items()}
    with torch.no_grad():
        found = model(**inputs).argmax(1).numpy()
    return float(np.mean(found == held_out.targets))


def main() -> None:
    """Print the table."""
    joint, clinic = crossfed.simulate(JOB), alone(2)
    print("record has     all three sites  clinic alone")
    for has in KINDS:
        row = (accuracy(joint, has), accuracy(clinic, has))
        print(f"{' and '.join(has):<15}{row[0]:>15.1%}{row[1]:>14.1%}")


if __name__ == "__main__":
    main()
