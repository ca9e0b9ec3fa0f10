"""The description of an optional method, and what a method may exclude.

``federation.job.method_checks`` refuses jobs that combine a method with something it
excludes; digests, kept state and traffic read the rest. What the method computes is in
``clients.methods``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Thing(StrEnum):
    """Things that a job can ask for, in the words of the documentation."""

    STEPS = "local steps instead of epochs"
    EPOCHS = "local epochs"
    CHOSEN_STEPS = "chosen numbers of local steps"
    LARGER_STEPS = "steps that grow during the run"
    OTHER_OPTIMIZERS = "local optimisers other than plain SGD"
    PLAIN_SGD = "plain SGD"
    MUON = "muon"
    WEIGHT_DECAY = "weight decay"
    WARM_UP = "a warm-up of the learning rate"
    KEPT_OPTIMIZER = "kept optimiser state"
    CLIPPED_STEPS = "gradient clipping"
    PROXIMAL = "the proximal term"
    NORMALIZED = "normalised steps"
    OVERLAP = "overlap"
    ALL_AHEAD = "rounds whose steps are all taken ahead"
    FLOAT16 = "float16"
    KEPT_ZEROS = "zeros that stay zero"
    NO_WEIGHTS = "weights that the factory draws"
    ADAPTERS = "adapters and soft prompts"
    TRAINER = "a Trainer's own loop"
    FLOWER_APPS = "Flower apps"
    OTHER_COUNTS = "tasks that report more than loss and accuracy"
    WEIGHTED_LOSS = "class weights and label smoothing"
    MEASURES = "further measures"
    CLASSES = "confusion matrices"
    FROZEN = "frozen parameters"
    TOKENIZERS = "named tokenisers"
    PERSONAL = "personal parts"
    CLUSTERS = "clusters"
    SHARED_CHOICE = "choices of a cluster that are averaged"
    FEWER_RANKS = "sites with fewer ranks of adapters"
    EXACT_ADAPTERS = "means of adapters' products"
    RANKS = "several ranks of one site"
    RELAYS = "relays"
    PARTIAL_ROUNDS = "rounds of fewer than all sites"
    SAMPLES = "samples of the sites"
    OTHER_COMBINE = "combine rules other than the mean"
    ROBUST = "combine rules that compare sites"
    DYNAMIC_WEIGHTS = "dynamic weights"
    PLAIN_MEAN = "the plain mean as the next model"
    SERVER_STEP = "other server optimisers"
    RUNNING_SUM = "the server optimiser running_sum"
    OTHER_MODEL = "selection of another model than the last"
    CODECS = "codecs"
    CODECS_UP = "codecs of updates"
    NOT_WHOLE = "models that are not sent whole"
    SUMS_DOWN = "sums sent in place of the model"
    SUMS_OF_ROUNDED = "sums after a first model in a codec"
    FRAGMENTS = "fragments"
    OPEN_UPDATES = "updates in the clear"
    SECURE = "secure aggregation"
    OPEN_SUMS = "secure sums without noise for whole sites"
    GROUPS = "sums of groups"
    LEVELS = "levels"
    RING_16 = "secure sums of 16 bits"
    OTHER_RINGS = "secure sums of other than 32 bits"
    ELEMENT_BOUND = "a bound of single elements"
    CLIP_ELEMENTS = "clipped elements"
    PRIVACY = "differential privacy"
    RECORDS = "differential privacy of records or persons"
    WHOLE_SITES = "differential privacy of whole sites"
    JOINT = "joint noise for records"
    SITE_RESULTS = "held-out results with noise for whole sites"


ONE_RANK = "ask the site's operator for compute.ranks = 1 without compute.compile"

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An optional method of training.

    Attributes:
        name: Its name; also that of what a site keeps of it.
        key: Path of its key in the job file.
        off: The key's value without the method.
        on: The only value of the key that switches the method on; None if every value
            but ``off`` does.
        parts: Other keys, which have no effect without the method, each with its value
            then.
        always_decides: Whether key and parts are in the digests of jobs without the
            method too. If not, such jobs have the digest that they had before the
            method existed.
        keeps: Whether sites keep arrays of it from round to round. All sites of a
            secure sum then begin with those of one round.
        follows_counted: Whether these arrays may only follow updates that are a part
            of the model. Tasks then name the newest round that counted, and the method
            must exclude rounds of fewer than all sites.
        needs_dense: Whether it changes the gradients of a local step, which then cannot
            be sparse.
        excludes: By ``Thing`` or another method's name: why a job cannot have both; and
            after a colon what to write instead, unless that is to do without it.
        private_because: Why the method keeps the promises of differential privacy. Jobs
            with both are refused if this is empty.
        ignores: Other keys, which have no effect with the method: what to set in their
            place.
        instead: How to do without the method.
        only_with_it: Each ``Thing`` that is a part of the method, and of nothing else.
    """

    name: str
    key: Path
    off: object = None
    on: object = None
    parts: Mapping[Path, object] = field(default_factory=dict)
    always_decides: bool = False
    keeps: bool = False
    follows_counted: bool = False
    needs_dense: bool = False
    excludes: Mapping[str, str] = field(default_factory=dict)
    private_because: str = ""
    ignores: Mapping[Path, str] = field(default_factory=dict)
    instead: str = "remove this key"
    only_with_it: tuple[Thing, ...] = ()

    @property
    def dotted_key(self) -> str:
        """Its key as the documentation names it."""
        return ".".join(self.key)

    @property
    def setting(self) -> str:
        """What switches the method on, as in the job file."""
        return self.dotted_key + (f' = "{self.on}"' if self.on else "")

    def is_on(self, job: object) -> bool:
        """Whether a job, a ``federation.job.spec.JobSpec``, uses the method."""
        return bool(self.places(job))

    def places(self, job: object) -> list[str]:
        """Find the keys that switch the method on in a job, as errors name them."""
        found: list[tuple[str, object]] = [("", job)]
        for name in self.key:
            found = [
                (f"{place}.{name}".lstrip("."), getattr(table, name))
                for outer, table_or_list in found
                for place, table in _tables(outer, table_or_list)
            ]
        return [place for place, value in found if self._is_on(value)]

    def _is_on(self, value: object) -> bool:
        return value != self.off if self.on is None else value == self.on


def _tables(place: str, value: object) -> list[tuple[str, object]]:
    """Return a table of the job, or each one of a list of them."""
    if not isinstance(value, tuple):
        return [(place, value)]
    return [(f"{place}[{index}]", each) for index, each in enumerate(value)]
