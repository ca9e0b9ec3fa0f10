"""The exit codes of commands, and of runs submitted to the aggregator.

0 done, 1 failed, 2 the job or the command line is wrong, 3 the privacy budget is spent,
4 an audit that could not have found a broken promise, 130 stopped on request after a
checkpoint.
"""

from collections.abc import Mapping

from federation.errors import (
    BudgetExceeded,
    CheckpointMismatch,
    FederationError,
    JobError,
    RunNotFound,
    RunStopped,
    SiteError,
)

DONE, FAILED, BAD_JOB, OUT_OF_BUDGET, INCONCLUSIVE, STOPPED = 0, 1, 2, 3, 4, 130

# By the status of a run that came to its end.
BY_STATUS: Mapping[str, int] = {
    "completed": DONE,
    "exhausted": OUT_OF_BUDGET,
    "stopped": STOPPED,
}

# A site's failure never ends a run: a SiteError that ends one is of the job, which a
# site refuses or cannot load data for, before any round.
BAD_JOB_ERRORS = (JobError, SiteError, CheckpointMismatch, RunNotFound)


def of_error(error: FederationError) -> int:
    """Exit code of a command or a run that ended with an error."""
    if isinstance(error, BudgetExceeded):
        return OUT_OF_BUDGET
    if isinstance(error, RunStopped):
        return STOPPED
    return BAD_JOB if isinstance(error, BAD_JOB_ERRORS) else FAILED


def status_of(code: int) -> str:
    """Status of a run that ended with a code."""
    return next((s for s, found in BY_STATUS.items() if found == code), "failed")
