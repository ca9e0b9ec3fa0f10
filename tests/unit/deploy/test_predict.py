"""Records of several parts of a data source, in one file of predictions."""

import numpy as np

from deploy.tools.predict import numbered


def test_records_say_which_part_they_are_from_and_their_number_there():
    """Numbers go on from batch to batch."""
    batches = [{"output": np.zeros((2, 3))}, {"output": np.zeros((1, 3))}]
    first, last = numbered("held_out", iter(batches))
    assert first["part"].tolist() == ["held_out"] * 2
    assert first["record_of_part"].tolist() == [0, 1]
    assert last["record_of_part"].tolist() == [2]
    assert last["output"].shape == (1, 3)
