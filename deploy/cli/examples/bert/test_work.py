"""Run with pytest: both jobs in their smallest form, in this process."""

from pathlib import Path

import numpy as np
import transfer
import work

SHORT = {"rounds": 1, "training.local_steps": 2, "evaluation.every": 0}


def test_adapters_train_on_the_pretrained_encoder(tmp_path: Path) -> None:
    first = transfer.pretrain(tmp_path, SHORT)
    digest = transfer.save(first, tmp_path / "saved")
    result = transfer.classify(tmp_path / "saved", digest, SHORT)
    assert result.status == "completed"
    # Adapters and the head travel; the encoder is frozen.
    assert result.bytes_up < first.bytes_up / 3


def test_labels_are_the_masked_words() -> None:
    train, _ = work.masked(most=50)
    hidden = train["input_ids"] == work.MASK
    assert np.array_equal(hidden, train["labels"] != work.IGNORED)
    assert 0.2 < hidden.mean() < 0.3
