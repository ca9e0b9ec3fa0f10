"""Exit codes: what an error ends with, and what a code says of a run."""

import pytest

from deploy import exit_codes
from federation.errors import (
    BudgetExceeded,
    FederationError,
    JobError,
    PrivacyError,
    RunNotFound,
    SiteError,
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (JobError("no"), 2),
        (SiteError("no"), 2),
        (RunNotFound("no"), 2),
        (BudgetExceeded("no"), 3),
        (PrivacyError("no"), 1),
        (FederationError("no"), 1),
    ],
)
def test_error_has_its_code(error: FederationError, expected: int) -> None:
    """Of a command and of a run alike."""
    assert exit_codes.of_error(error) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, "completed"),
        (1, "failed"),
        (2, "failed"),
        (3, "exhausted"),
        (130, "stopped"),
    ],
)
def test_code_tells_the_status(code: int, expected: str) -> None:
    """As ``crossfed ps`` shows it."""
    assert exit_codes.status_of(code) == expected
