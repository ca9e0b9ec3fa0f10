"""Records standardised by noised statistics of their own site.

The mean and the deviation of each feature, over the site's training records, are
released once for a dataset and the options that they are made with, and charged to the
ledger before. The site remembers them: a run that is resumed, and the next run on the
same data, take what was released instead of releasing it again. Held-out records are
standardised by the same numbers, which are none of theirs. Where persons
are protected, each person counts once, with the mean over its records.

Every draw of noise has a charge of its own. A site draws, remembers the draw as unpaid,
charges, and only then uses it. After a crash it finds its draw and charges what is not
charged yet. Where the memory was lost, or restored from before the draw, and the ledger
was not, the draw is gone: a new one is charged, whatever the ledger holds already.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from clients.data.datasets import Batch, Dataset, Indices
from clients.data.loader_workers import LoaderWorkers
from clients.data.privacy_units import num_units, persons_of
from clients.privacy.site_memory import Document, SiteMemory
from clients.randomness import SECRET_BYTES, RandomBytes, seeded_globally
from federation.errors import CorruptObject, JobError, SiteError
from federation.job.privacy_job import StandardiseSpec
from federation.job.spec import JobSpec
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import Ledger
from privacy.dp.moments import Array, MomentsMechanism
from privacy.dp.persons import Persons
from privacy.dp.poisson import poisson_indices
from privacy.keystream import KEY_BYTES, Keystream

DOCUMENT = "statistics"
ROUND = 0  # They are charged before the first round.

_TABLE = "privacy.differential_privacy.standardise"
# Of a draw that may not be charged yet: charges of the run's ledger before it.
_UNPAID = "charged_before"
_READ_AT_ONCE = 4096


class RepeatingLedger(Ledger, Protocol):
    """A ledger that can count releases of another run."""

    def repeat(self, event: PrivacyEvent, *, round_index: int) -> None:
        """Count a release in this run, but not again over all runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Released statistics of a site's records.

    Attributes:
        centre: Mean of each feature, in the data's own units.
        spread: Deviation of each feature, above 0.
    """

    centre: tuple[float, ...]
    spread: tuple[float, ...]

    def apply(self, data: Dataset) -> Dataset:
        """Return the data with every record standardised.

        Raises:
            SiteError: The records have another number of features.
        """
        found = num_features(data)
        if found != len(self.centre):
            raise SiteError(
                f"the records have {found} features, and statistics of "
                f"{len(self.centre)} were released of this dataset: give it a "
                "different name in site.toml (data.name), or restore the previous data"
            )
        shape = (1, -1) + (1,) * (len(_shape(data)) - 1)
        return _StandardisedDataset(
            data,
            torch.tensor(self.centre, dtype=torch.float32).view(shape),
            torch.tensor(self.spread, dtype=torch.float32).view(shape),
        )

    def document(self) -> Document:
        """Plain values, for JSON."""
        return {name: list(values) for name, values in asdict(self).items()}

    @classmethod
    def parse(cls, document: Any) -> "Statistics":
        """Read what ``document`` wrote.

        Raises:
            CorruptObject: It is not that.
        """
        try:
            return cls(
                centre=tuple(float(x) for x in document["centre"]),
                spread=tuple(float(x) for x in document["spread"]),
            )
        except (TypeError, KeyError, ValueError) as error:
            raise CorruptObject(
                f"this site's memory of noised statistics is damaged: {error!r}; "
                f"restore the document {DOCUMENT!r}"
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class _StandardisedDataset:
    """A ``Dataset`` whose records are standardised as they are read."""

    data: Dataset
    centre: torch.Tensor
    spread: torch.Tensor

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Indices) -> Batch:
        inputs, targets = self.data.batch(indices)
        return (inputs - self.centre) / self.spread, targets

    def labels(self) -> Indices | None:
        return self.data.labels()

    @property
    def groups(self) -> Indices | None:
        return self.data.groups

    @property
    def group_names(self) -> tuple[str, ...]:
        return self.data.group_names

    @property
    def persons(self) -> NDArray[Any] | None:
        return self.data.persons

    @property
    def workers(self) -> LoaderWorkers | None:
        """The worker processes that read it, outside private steps."""
        found: LoaderWorkers | None = getattr(self.data, "workers", None)
        return found

    def subset(self, indices: Indices) -> "_StandardisedDataset":
        return _StandardisedDataset(self.data.subset(indices), self.centre, self.spread)

    def apart(self) -> "_StandardisedDataset":
        return _StandardisedDataset(self.data.apart(), self.centre, self.spread)


def num_features(data: Dataset) -> int:
    """Number of columns of a record, or of channels of an image.

    Raises:
        SiteError: Records are tokens, or single numbers.
    """
    inputs, _ = data.batch(np.array([0]))
    if not isinstance(inputs, torch.Tensor):
        raise SiteError(
            f"records of several arrays cannot be standardised: remove {_TABLE} from "
            "the job"
        )
    if not inputs.is_floating_point() or inputs.ndim < 2:  # noqa: PLR2004
        raise SiteError(
            f"records of type {inputs.dtype} and shape {list(inputs.shape[1:])} have "
            f"no features to standardise: remove {_TABLE} from the job"
        )
    return inputs.shape[1]


def mechanism(job: JobSpec, train: Dataset) -> MomentsMechanism | None:
    """Make the mechanism of a site's statistics; None if the job asks for none.

    Raises:
        JobError: The job states bounds of other features than the records have.
        SiteError: The records have no features.
    """
    wanted = job.privacy.differential_privacy.standardise
    if wanted is None:
        return None
    features, stated = num_features(train), max(len(wanted.low), len(wanted.high))
    if stated not in {1, features}:
        raise JobError(
            f"the job gives bounds for {stated} features, but records have {features}",
            key=f"{_TABLE}.low",
        )
    return MomentsMechanism(
        noise_multiplier=wanted.noise_multiplier,
        num_features=features,
        num_records=num_units(job, train),
    )


def events(job: JobSpec, train: Dataset) -> tuple[PrivacyEvent, ...]:
    """Return the cost of a site's statistics; empty if the job requests none.

    Raises:
        FederationError: See ``mechanism``.
    """
    found = mechanism(job, train)
    return () if found is None else (found.event(),)


def release(
    job: JobSpec, train: Dataset, random_bytes: RandomBytes = os.urandom
) -> Statistics:
    """Compute statistics of a site's training records, and add noise.

    Args:
        job: The job, which asks for them.
        train: The records.
        random_bytes: Source of fresh keys.

    Raises:
        FederationError: See ``mechanism``.
    """
    spec, train = job.privacy.differential_privacy.standardise, train.apart()
    moments = mechanism(job, train)
    if spec is None or moments is None:
        raise ValueError("the job requests no statistics")
    shape = (1, -1) + (1,) * (len(_shape(train)) - 1)
    low, high = (np.array(bound, dtype=np.float64) for bound in (spec.low, spec.high))
    middle, half = (high + low) / 2, (high - low) / 2

    def contributions(records: Indices) -> Array:
        inputs, _ = train.batch(records)
        values = inputs.numpy().astype(np.float64)
        units = (values - middle.reshape(shape)) / half.reshape(shape)
        return moments.contributions(units)

    persons = persons_of(job, train)
    keystream = Keystream(random_bytes(KEY_BYTES))
    chosen = poisson_indices(moments.num_records, moments.rate, keystream)
    sums: Array = np.zeros(2 * moments.num_features + 1)
    secret = random_bytes(SECRET_BYTES)
    with seeded_globally(secret, torch.device("cpu")):  # Transforms may draw.
        for start in range(0, len(chosen), _READ_AT_ONCE):
            block = chosen[start : start + _READ_AT_ONCE]
            if persons is None:
                sums += contributions(block).sum(axis=0)
            else:
                sums += _sum_of_persons(moments, persons, block, contributions)
    mean, deviation = moments.read(moments.release(sums, random_bytes))
    return Statistics(
        centre=tuple((middle + half * mean).tolist()),
        spread=tuple((half * deviation).tolist()),
    )


def _sum_of_persons(
    moments: MomentsMechanism,
    persons: Persons,
    block: Indices,
    contributions: Callable[[Indices], Array],
) -> Array:
    """Add up what some persons contribute, each with all of its records.

    Args:
        moments: The mechanism.
        persons: Whose record each is.
        block: Numbers of the persons.
        contributions: Reads records and returns what each would add.
    """
    records, sizes = persons.records_of(block)
    owners = np.repeat(np.arange(len(block)), sizes)
    totals: Array = np.zeros((len(block), 2 * moments.num_features + 1))
    for start in range(0, len(records), _READ_AT_ONCE):
        piece = slice(start, start + _READ_AT_ONCE)
        np.add.at(totals, owners[piece], contributions(records[piece]))
    total: Array = moments.of_persons(totals, sizes).sum(axis=0)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsMemory:
    """Statistics of one dataset, made with certain options, in a site's memory.

    Attributes:
        memory: The site's.
        lineage: Names the data; see ``clients.privacy.cohorts.lineage``.
        spec: The options.
        run_id: The run that asks.
        of_persons: Whether the noise hides persons: statistics of records are others.
    """

    memory: SiteMemory
    lineage: str
    spec: StandardiseSpec
    run_id: str
    of_persons: bool = False

    def of_another_run(self) -> bool:
        """Whether they were released, and charged, in another run."""
        entry = self._entry()
        return _is_paid(entry) and entry["run_id"] != self.run_id

    def take(
        self,
        ledger: RepeatingLedger,
        event: PrivacyEvent,
        make: Callable[[], Statistics],
    ) -> Statistics:
        """Return released statistics, or draw, charge and release them.

        Raises:
            BudgetExceeded: The charge is beyond a budget; nothing was released.
            StoreError: The memory or the ledger cannot be read or written.
        """
        entry, charged = self._entry(), num_charged(ledger, event)
        if _is_paid(entry):
            if entry["run_id"] != self.run_id and not charged:
                ledger.repeat(event, round_index=ROUND)
            return Statistics.parse(entry["result"])
        if entry.get("run_id") != self.run_id:
            draw = {"run_id": self.run_id, "result": make().document()}
            entry = self._keep({**draw, _UNPAID: charged})
        if charged <= entry.get(_UNPAID, charged):
            ledger.charge(event, round_index=ROUND)
        paid = {key: value for key, value in entry.items() if key != _UNPAID}
        return Statistics.parse(self._keep(paid)["result"])

    @property
    def _name(self) -> str:
        facts = [self.lineage, asdict(self.spec), self.of_persons]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(b"crossfed/statistics\0" + text.encode()).hexdigest()

    def _entry(self) -> Document:
        found: Document = self.memory.read(DOCUMENT).get(self._name, {})
        return found

    def _keep(self, entry: Document) -> Document:
        """Remember an entry, unless another run was charged for one meanwhile."""

        def change(document: Document) -> Document:
            before = document.get(self._name, {})
            return document if _is_paid(before) else {**document, self._name: entry}

        found: Document = self.memory.update(DOCUMENT, change)[self._name]
        return found


def _is_paid(entry: Document) -> bool:
    return "result" in entry and _UNPAID not in entry


def num_charged(ledger: Ledger, event: PrivacyEvent) -> int:
    """How often a ledger was charged for statistics."""
    return sum(
        charge.round_index == ROUND and charge.event == event
        for charge in ledger.charges()
        if charge.purpose == "train"
    )


def _shape(data: Dataset) -> tuple[int, ...]:
    inputs, _ = data.batch(np.array([0]))
    return tuple(inputs.shape[1:])
