"""The description of an optional method, and what a method may exclude.

``federation.job.method_checks`` refuses jobs that combine a method with something it
excludes; digests, kept state and traffic read the rest. What the method computes is in
``clients.methods``.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Thing(StrEnum):
    """Things that a job can ask for, in the words of the documentation."""

    EPOCHS = "local epochs"
    CHOSEN_STEPS = "chosen numbers of local steps"
    OTHER_OPTIMIZERS = "local optimisers other than plain SGD"
    CLIPPED_STEPS = "gradient clipping"
    PROXIMAL = "the proximal term"
    NORMALIZED = "normalised steps"
    OVERLAP = "overlap"
    FLOAT16 = "float16"
    TRAINER = "a Trainer's own loop"
    FLOWER_APPS = "Flower apps"
    CLUSTERS = "clusters"
    FEWER_RANKS = "sites with fewer ranks of adapters"
    EXACT_ADAPTERS = "means of adapters' products"
    RANKS = "several ranks of one site"
    RELAYS = "relays"
    PARTIAL_ROUNDS = "rounds of fewer than all sites"
    OTHER_COMBINE = "combine rules other than the mean"
    DYNAMIC_WEIGHTS = "dynamic weights"
    PLAIN_MEAN = "the plain mean as the next model"
    SERVER_STEP = "other server optimisers"
    RUNNING_SUM = "the server optimiser running_sum"
    CODECS = "codecs"
    LEVELS = "levels"
    RING_16 = "secure sums of 16 bits"
    CLIP_ELEMENTS = "clipped elements"
    PRIVACY = "differential privacy"


ONE_RANK = "ask the site's operator for compute.ranks = 1 without compute.compile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An optional method of training.

    Attributes:
        name: Its name; also that of what a site keeps of it.
        key: Path of its key in the job file.
        off: The key's value without the method. Such jobs have the digest that they
            had before the method existed.
        keeps: Whether sites keep arrays of it from round to round. All sites of a
            secure sum then begin with those of one round.
        follows_counted: Whether these arrays may only follow updates that are a part
            of the model. Tasks then name the newest round that counted, and the method
            must exclude rounds of fewer than all sites.
        adds_to_gradients: Whether it adds to the gradients of a local step, which then
            cannot be sparse.
        excludes: By ``Thing`` or another method's name: why a job cannot have both, and
            what to write instead.
        only_with_it: Each ``Thing`` that is a part of the method, and of nothing else.
    """

    name: str
    key: tuple[str, ...]
    off: object
    keeps: bool = False
    follows_counted: bool = False
    adds_to_gradients: bool = False
    excludes: Mapping[str, str]
    only_with_it: tuple[Thing, ...] = ()

    @property
    def dotted_key(self) -> str:
        """Its key as errors name it."""
        return ".".join(self.key)

    def is_on(self, job: object) -> bool:
        """Whether a job, a ``federation.job.spec.JobSpec``, uses the method."""
        return bool(functools.reduce(getattr, self.key, job) != self.off)
