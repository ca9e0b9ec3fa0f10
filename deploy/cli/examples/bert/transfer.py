"""Pretrain, then fine-tune: ``python transfer.py`` prints accuracy with and without.

The first run's encoder becomes a folder as transformers saves it. Each site of the
second job has that folder; the job names it with its digest.
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import work

import crossfed
from clients.models import hugging_face
from clients.models.pretrained import folder_digest

FOLDER = Path(__file__).parent

Changes = Mapping[str, Any] | None


def pretrain(runs: Path, changes: Changes = None) -> crossfed.RunResult:
    """Run the first job."""
    folder = runs / "first"
    return crossfed.simulate(FOLDER / "job.toml", changes, folder=folder, report=False)


def save(result: crossfed.RunResult | None, folder: Path) -> str:
    """Write a run's model for transformers, or a random one; return its digest."""
    model: Any = hugging_face(**crossfed.load_job(FOLDER / "job.toml").model.options)
    if result is not None:
        model.load_state_dict(result.state_dict(), strict=False)
    model.config.num_labels = len(work.PACKAGES)  # Of the head that comes next.
    model.save_pretrained(folder)
    return folder_digest(folder, tokenizer=False)


def classify(folder: Path, digest: str, changes: Changes = None) -> crossfed.RunResult:
    """Run the second job on the weights of a folder."""
    encoder = {"model.options.folder": str(folder), "model.options.sha256": digest}
    return crossfed.simulate(FOLDER / "classify.toml", {**encoder, **(changes or {})})


def main(runs: Path) -> None:
    """Compare a pretrained start with a random one."""
    result = pretrain(runs)
    print(f"perplexity of masked words: {math.exp(result.loss or math.inf):.1f}")
    for name, start in (("pretrained", result), ("random", None)):
        found = classify(runs / name, save(start, runs / name))
        sent = found.bytes_up / len(found.history) / 3
        print(f"{name:<11} accuracy {found.accuracy:.1%}, {sent:,.0f} bytes up a round")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
