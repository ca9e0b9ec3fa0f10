"""The description of an optional method, and what a method may exclude.

``federation.job.method_checks`` refuses jobs that combine a method with something it
excludes; digests, kept state and traffic read the rest. What the method computes is in
``clients.methods``.
"""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Thing(StrEnum):
    """Things that a job can ask for, in the words of the documentation."""

    STEPS = "local steps instead of epochs"
    EPOCHS = "local epochs"
    SEVERAL_STEPS = "rounds of other than one step"
    CHOSEN_STEPS = "chosen numbers of local steps"
    LARGER_STEPS = "steps that grow during the run"
    OTHER_OPTIMIZERS = "local optimisers other than plain SGD"
    PLAIN_SGD = "plain SGD"
    MUON = "muon"
    WEIGHT_DECAY = "weight decay"
    WARM_UP = "a warm-up of the learning rate"
    RATE_SCHEDULE = "schedules of the learning rate"
    KEPT_OPTIMIZER = "kept optimiser state"
    CLIPPED_STEPS = "gradient clipping"
    PROXIMAL = "the proximal term"
    NORMALIZED = "normalised steps"
    OVERLAP = "overlap"
    ALL_AHEAD = "rounds whose steps are all taken ahead"
    FLOAT16 = "float16"
    STATISTICS = "statistics"
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
    TOKENS = "tasks of tokens"
    CONTRASTIVE = "the task contrastive"
    MAX_BUFFERS = "largest values of integer buffers"
    DEALT_PERSONS = "records of one person at several sites"
    PERSONAL = "personal parts"
    CLUSTERS = "clusters"
    SHARED_CHOICE = "choices of a cluster that are averaged"
    FEWER_RANKS = "sites with fewer ranks of adapters"
    EXACT_ADAPTERS = "means of adapters' products"
    RANKS = "several ranks of one site"
    RELAYS = "relays"
    BUFFERED = "buffered rounds"
    CAPACITY = "work by capacity"
    PLACEMENT = "data that moves between sites"
    PARTIAL_ROUNDS = "rounds of fewer than all sites"
    SAMPLES = "samples of the sites"
    ALL_ASKED = "rounds that ask all sites"
    REMEMBERING = "samples that follow what sites did"
    FAIR = "fair sampling"
    UTILITY = "sampling by utility"
    OVER_SELECTION = "over-selection"
    REPLICAS = "replicas"
    MEAN = "the mean"
    OTHER_COMBINE = "combine rules other than the mean"
    UNGROUPED = "combine rules other than the mean without groups"
    OWN_RULE = "your own combine rule"
    ROBUST = "combine rules that compare sites"
    DYNAMIC_WEIGHTS = "dynamic weights"
    OTHER_WEIGHTS = "weights other than uniform"
    PLAIN_MEAN = "the plain mean as the next model"
    SERVER_STEP = "other server optimisers"
    RUNNING_SUM = "the server optimiser running_sum"
    RARE_RESULTS = "evaluation in only some rounds"
    NO_RESULTS = "runs without evaluation"
    OTHER_MODEL = "selection of another model than the last"
    CODECS = "codecs"
    CODECS_UP = "codecs of updates"
    COMPARED_PLACES = "rules that compare sites, of which each sends other places"
    CHANGES = "changes sent in place of the model"
    SUMS_DOWN = "sums sent in place of the model"
    SUMS_OF_ROUNDED = "sums after a first model in a codec"
    OPEN_UPDATES = "updates in the clear"
    SECURE = "secure aggregation"
    OPEN_SUMS = "secure sums without noise for whole sites"
    GROUPS = "sums of groups"
    SUMS_OF_ALL = "secure sums of all sites"
    FREE_SUMS = "secure sums of whichever sites are ready"
    LEVELS = "levels"
    RING_16 = "secure sums of 16 bits"
    OTHER_RINGS = "secure sums of other than 32 bits"
    ELEMENT_BOUND = "a bound of single elements"
    CLIP_ELEMENTS = "clipped elements"
    PRIVACY = "differential privacy"
    NO_PRIVACY = "no unit of privacy"
    RECORDS = "differential privacy of records or persons"
    JOINT = "joint noise for records"
    WHOLE_SITES = "noise for whole sites"
    SITE_RESULTS = "held-out results with noise for whole sites"
    MIXED_RESULTS = "noised results of records that change other predictions"
    RECORD_RESULTS = "held-out results whose noise is for records"


ONE_RANK = (
    "ranks do not support this: ask the site's operator for compute.ranks = 1 without "
    "compute.compile"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An optional method of a job.

    Attributes:
        name: Its name; also that of what a site keeps of it.
        key: Its key in the job file, with dots.
        on: The values of the key that switch the method on; if empty, every value but
            the key's default does.
        parts: Other keys, which have no effect without the method, or without another
            one that names them too.
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
        excludes: Why a job cannot have the method and a ``Thing`` or another method,
            and after a colon what to write instead, unless that is to do without it;
            with that thing, or all things of which it is true.
        private_because: Why the method keeps the promises of differential privacy. Jobs
            with both are refused if this is empty.
        ignores: Other keys, which have no effect with the method: why, or what to set
            in their place.
        instead: How to do without the method.
        only_with_it: Each ``Thing`` that is a part of the method, and of nothing else.
    """

    name: str
    key: str
    on: tuple[object, ...] = ()
    parts: tuple[str, ...] = ()
    always_decides: bool = False
    keeps: bool = False
    follows_counted: bool = False
    needs_dense: bool = False
    excludes: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    private_because: str = ""
    ignores: Mapping[str, str] = field(default_factory=dict)
    instead: str = "remove this key"
    only_with_it: tuple[Thing, ...] = ()

    @property
    def setting(self) -> str:
        """What switches the method on, as in the job file."""
        values = " or ".join(f'"{each}"' for each in self.on)
        return f"{self.key} = {values}" if values else self.key

    @property
    def excluded(self) -> Mapping[str, str]:
        """The reason of each thing that it excludes."""
        return {
            thing: reason
            for reason, things in self.excludes.items()
            for thing in ((things,) if isinstance(things, str) else things)
        }

    def is_on(self, job: object) -> bool:
        """Whether a job, a ``federation.job.spec.JobSpec``, uses the method."""
        last, found = _LAST.get((self.key, self.on), (None, False))
        if last is not job:  # Each of thousands of sites asks, in each round.
            found = bool(self.places(job))
            _LAST[self.key, self.on] = job, found
        return found

    def places(self, job: object) -> list[str]:
        """Find the keys that switch the method on in a job, as errors name them."""
        return places_of(job, self.key, self.on)


# Of each setting the job that was asked about last, and whether it was on there.
_LAST: dict[tuple[str, tuple[object, ...]], tuple[object, bool]] = {}


def places_of(job: object, key: str, values: tuple[object, ...] = ()) -> list[str]:
    """Find a key in a job where it has one of some values, or just not its default."""
    *outer, last = key.split(".")
    tables: list[tuple[str, Any]] = [("", job)]
    for name in outer:
        tables = [
            found
            for place, table in tables
            for found in _tables(place + name, getattr(table, name))
        ]
    return [
        place + last
        for place, table in tables
        if (value := getattr(table, last)) in values
        or not (values or value == default_of(table, last))
    ]


def default_of(table: Any, key: str) -> Any:
    """Return the default of a key below a table of the job file, or its class."""
    first, _, rest = key.partition(".")
    if rest:
        hint = typing.get_type_hints(table)[first]
        inner = filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint)))
        return default_of(next(inner), rest)
    found = table.__dataclass_fields__[first]
    if found.default_factory is not dataclasses.MISSING:
        return found.default_factory()
    return found.default


def _tables(place: str, value: Any) -> list[tuple[str, Any]]:
    """Return a table of the job, or each one of a list of them, with its prefix."""
    if isinstance(value, tuple):
        return [(f"{place}[{index}].", each) for index, each in enumerate(value)]
    return [] if value is None else [(f"{place}.", value)]
