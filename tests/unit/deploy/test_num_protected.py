import numpy as np
import pytest
from support.small_jobs import small_job

from clients.data.datasets import Dataset, Examples, as_dataset
from clients.privacy.sum_plan import num_protected


def _dataset(size: int) -> Dataset:
    return as_dataset(Examples(inputs=np.zeros((size, 2), np.float32)), name="test")


@pytest.mark.parametrize(
    ("held_out", "every", "expected"),
    [("noise", 1, 50), ("noise", 0, 20), ("public", 1, 20)],
)
def test_delta_is_for_the_larger_set_with_noise(
    held_out: str, every: int, expected: int
):
    """Held-out records have the same delta, and may be more."""
    job = small_job(
        evaluation={"every": every},
        aggregation={"weights": "uniform"},
        privacy={
            "differential_privacy": {
                "unit": "record",
                "target_epsilon": 1.0,
                "held_out": held_out,
            }
        },
    )
    assert num_protected(job, _dataset(20), _dataset(50)) == expected
    assert num_protected(job, _dataset(60), _dataset(50)) == 60
