"""All described methods, and questions about those that a job uses."""

from collections.abc import Iterator

from federation.methods.control_variates import CONTROL_VARIATES
from federation.methods.feddyn import FEDDYN
from federation.methods.method import Method

METHODS: tuple[Method, ...] = (CONTROL_VARIATES, FEDDYN)


def used_by(job: object) -> Iterator[Method]:
    """Find the methods that a job, a ``federation.job.spec.JobSpec``, uses."""
    return (method for method in METHODS if method.is_on(job))


def excluding(job: object, thing: str) -> Iterator[tuple[Method, str]]:
    """Find the job's methods that exclude something, each with its reason."""
    for method in used_by(job):
        if thing in method.excludes:
            yield method, method.excludes[thing]


def follows_counted(job: object) -> bool:
    """Whether tasks of a job must name the newest round whose update counted."""
    return any(method.follows_counted for method in used_by(job))
