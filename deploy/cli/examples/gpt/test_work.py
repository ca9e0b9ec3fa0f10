"""Run with pytest: both jobs in their smallest form, in this process."""

from pathlib import Path

import numpy as np
import work

import crossfed

FOLDER = Path(__file__).parent
SHORT = {"rounds": 1, "training.local_steps": 2, "evaluation.every": 0}


def test_fine_tuning_starts_from_the_pretrained_model(tmp_path: Path) -> None:
    less = {
        **SHORT,
        "data.options.max_bytes": 150_000,
        "data.partition.kind": "iid",
    }
    first = crossfed.simulate(FOLDER / "job.toml", less, folder=tmp_path / "first")
    few = {f"sites.{site}.data.options.most": 60 for site in range(3)}
    changes = {**SHORT, **few, "model.weights": str(tmp_path / "first")}
    second = crossfed.simulate(FOLDER / "sft.toml", changes)
    assert second.status == "completed"
    name = "blocks.0.mlp.out.weight"
    moved = np.abs(second.weights[name] - first.weights[name]).max()
    assert 0 < moved < 0.1


def test_only_docstrings_are_learned() -> None:
    (ids, labels), _ = work.docstrings(parts=3, most=20)
    assert ids.shape == labels.shape == (20, work.CONTEXT)
    for row, wanted in zip(ids, labels, strict=True):
        learned = wanted != work.IGNORED
        assert bytes(row[~learned].astype(np.uint8)).startswith(b"def ")
        assert (row[learned] == wanted[learned]).all()
