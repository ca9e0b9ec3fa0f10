"""All described methods, and questions about those that a job uses."""

from collections.abc import Iterator

from federation.methods.adapter_ranks import FEWER_RANKS
from federation.methods.buffered import BUFFERED, BUFFERED_SUMS
from federation.methods.capacity import CAPACITY, PLACEMENT
from federation.methods.combining import (
    CODECS_UP,
    DYNAMIC_WEIGHTS,
    FAIR,
    OVER_SELECTION,
    REMEMBERING,
    REPLICAS,
    ROBUST,
    SAMPLES,
    UTILITY,
)
from federation.methods.control_variates import CONTROL_VARIATES
from federation.methods.differential_privacy import (
    ADAPTIVE_CLIP,
    JOINT,
    PERSON,
    PRIVACY,
    RECORD,
    STANDARDISE,
    WHOLE_SITES,
)
from federation.methods.feddyn import FEDDYN
from federation.methods.flower_apps import FLOWER_APPS
from federation.methods.half_precision import FLOAT16
from federation.methods.joining import JOINING
from federation.methods.kept_optimizer import KEPT_OPTIMIZER
from federation.methods.kept_zeros import KEPT_ZEROS
from federation.methods.levels import LEVELS
from federation.methods.local_work import CHOSEN_STEPS, LARGER_STEPS
from federation.methods.method import Method
from federation.methods.normalized_steps import NORMALIZED_STEPS
from federation.methods.overlap import OVERLAP
from federation.methods.personal import CLUSTERS, PERSONAL
from federation.methods.proximal import PROXIMAL
from federation.methods.relays import RELAYS
from federation.methods.secure_aggregation import ELEMENT_BOUND, GROUPS, SECURE
from federation.methods.selection import BEST_MODEL, EARLY_STOPPING, EMA, SWA
from federation.methods.statistics import STATISTICS
from federation.methods.users_loop import USERS_LOOP

METHODS: tuple[Method, ...] = (
    *(PROXIMAL, NORMALIZED_STEPS, CONTROL_VARIATES, FEDDYN),
    *(OVERLAP, CHOSEN_STEPS, LARGER_STEPS),
    *(FLOAT16, KEPT_OPTIMIZER, KEPT_ZEROS, FEWER_RANKS),
    *(PERSONAL, CLUSTERS, USERS_LOOP, FLOWER_APPS),
    *(RELAYS, SAMPLES, REMEMBERING, FAIR, UTILITY, OVER_SELECTION, REPLICAS),
    *(CODECS_UP, DYNAMIC_WEIGHTS, ROBUST),
    *(BUFFERED, BUFFERED_SUMS, CAPACITY, PLACEMENT, JOINING),
    *(BEST_MODEL, EARLY_STOPPING, EMA, SWA),
    STATISTICS,
    *(SECURE, GROUPS, LEVELS, ELEMENT_BOUND),
    *(PRIVACY, RECORD, PERSON, JOINT, WHOLE_SITES, ADAPTIVE_CLIP, STANDARDISE),
)


def used_by(job: object) -> Iterator[Method]:
    """Find the methods that a job, a ``federation.job.spec.JobSpec``, uses."""
    return (method for method in METHODS if method.is_on(job))


def excluding(job: object, thing: str) -> Iterator[tuple[Method, str]]:
    """Find the job's methods that exclude something, each with its reason."""
    for method in used_by(job):
        if thing in method.excluded:
            yield method, method.excluded[thing]


def follows_counted(job: object) -> bool:
    """Whether tasks of a job must name the newest round whose update counted."""
    return any(method.is_on(job) for method in METHODS if method.follows_counted)
