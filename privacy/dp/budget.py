"""Checks delta, batch and number of records before anything is trained."""

import math

from federation.errors import JobError
from privacy.dp.accountant import MIN_DELTA

# delta <= 1 / (10 n): the mechanism that publishes one record at random is
# (0, 1/n)-private, so delta must be well below 1/n to say anything
# (Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2.3).
DELTA_SHARE = 10

# Of the mean update, at most, to the noise on it: below it a job must insist.
MIN_SIGNAL_TO_NOISE = 0.5

_DELTA_KEY = "privacy.differential_privacy.delta"
_BATCH_KEY = "training.batch_size"


def largest_delta(num_records: int) -> float:
    """Largest accepted delta for a number of records: 1 / (10 n)."""
    if num_records < 1:
        raise ValueError(f"there is no delta for {num_records} records")
    return 1 / (DELTA_SHARE * num_records)


def default_delta(num_records: int) -> float:
    """``largest_delta`` rounded down to one digit: 5e-7 for 180,000 records."""
    largest = largest_delta(num_records)
    exponent = math.floor(math.log10(largest))
    # In decimal, for 1e-06 has no exact binary and must not be rounded up.
    for digit in range(9, 0, -1):
        found = float(f"{digit}e{exponent}")
        if found <= largest:
            return found
    return float(f"9e{exponent - 1}")


def check_delta(
    delta: float, num_records: int, *, what: str = "training records"
) -> None:
    """Refuse a delta that is too large or too small for a number of records.

    Args:
        delta: The probability.
        num_records: n; how many of what is protected there are.
        what: What these are, in the plural.

    Raises:
        JobError: It is larger than 1 / (10 n), or too small for the accountant.
    """
    largest = largest_delta(num_records)
    if not delta >= MIN_DELTA:
        raise JobError(
            f"{delta:g} is below {MIN_DELTA:g}, the smallest delta that the accountant "
            f"can resolve; the rule for {num_records} {what} gives "
            f"{max(default_delta(num_records), MIN_DELTA):g}",
            key=_DELTA_KEY,
        )
    if delta > largest:
        raise JobError(
            f"{delta:g} is too large for {num_records} {what}: at most 1 / (10 n) = "
            f"{largest:.3g}; without it, delta is {default_delta(num_records):g}",
            key=_DELTA_KEY,
        )


def check_records(
    num_records: int, expected_batch: int, *, what: str = "training records"
) -> None:
    """Refuse a site whose records do not fill one expected batch.

    Its sampling rate would be above 1.

    Args:
        num_records: How many of what is protected there are.
        expected_batch: How many of them a step samples on average.
        what: What these are, in the plural.

    Raises:
        JobError: There are fewer records than ``expected_batch``.
    """
    if num_records < expected_batch:
        raise JobError(
            f"a site has at most {num_records} {what}, fewer than a batch of "
            f"{expected_batch} (batch_size times accumulate): under differential "
            "privacy each step draws all of them independently, with probability "
            f"batch / {what}, so choose at most {num_records}, or leave the site out",
            key=_BATCH_KEY,
        )
