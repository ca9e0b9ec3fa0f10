"""Digits of two hospitals, of which neither has one of the other's."""

from clients import data
from clients.data.datasets import Examples
from clients.preprocessing import preprocessing


@preprocessing("none")
def digits(hospital: int) -> tuple[Examples, Examples]:
    """Every second digit: the even places for hospital 0, the odd ones for 1."""
    train, held_out = (
        Examples(inputs=part.inputs[hospital::2], targets=part.targets[hospital::2])
        for part in data.digits()
    )
    return train, held_out
