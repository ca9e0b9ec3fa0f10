"""What a site does in a round of statistics: it adds up, and adds noise.

It takes the place of a trainer: sums leave as an update, so that everything that holds
for updates, from masks to resuming, holds for them. With differential privacy,
``clients.privacy.spending`` charges the round before.
"""

# ruff: noqa: ARG002 -- what training needs, sums do not use

import logging
import os
from collections.abc import Callable, Sequence
from typing import Unpack

import numpy as np

from clients.data.datasets import Dataset
from clients.randomness import RandomBytes
from clients.statistics import columns
from clients.statistics.small_cells import hide_small
from clients.statistics.sums import sums_of
from federation.errors import ProtocolError
from federation.ids import SiteId
from federation.job.statistics_table import Stage, Sums, Table, windows
from federation.messages import MetricSums, PrivacySpent
from federation.protocols import (
    FitArguments,
    LocalUpdate,
    RoundCharges,
)
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Vector
from privacy.dp.tables import mechanism_of

_LOG = logging.getLogger(__name__)


class StatisticsTrainer:
    """A ``federation.protocols.Trainer`` that adds up what a job asks."""

    def __init__(
        self,
        table: Table,
        site: SiteId,
        *,
        layout: Layout,
        train: Dataset,
        noise_multiplier: float | None = None,
        least_count: int = 1,
        tell: Callable[[str], None] = _LOG.info,
        note_places: Callable[[Sequence[int]], None] = lambda _: None,
        random_bytes: RandomBytes = os.urandom,
    ) -> None:
        """Read the columns of a site's training records.

        Args:
            table: What the job asks.
            site: Name of the site, for errors.
            layout: Layout of the update.
            train: The records.
            noise_multiplier: Noise of a round; None for exact sums.
            least_count: Fewest records in a cell of exact sums.
            tell: Takes what is about to leave, for the site's operator.
            note_places: Takes where exact sums look for quantiles, before they are
                computed; it may refuse.
            random_bytes: Source of the keys of the noise.

        Raises:
            SiteError: Columns are missing, or are not what the job says.
        """
        self._table = table
        self._layout = layout
        self._columns = columns.read(table, train, site, _LOG.warning)
        self._noise = noise_multiplier
        self._least = least_count
        self._tell = tell
        self._note_places = note_places
        self._random_bytes = random_bytes

    def layout(self) -> Layout:
        """Layout of the update."""
        return self._layout

    def pay(self, **charges: Unpack[RoundCharges]) -> None:
        """Pay nothing: exact sums are not charged, and others are by the caller."""

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[FitArguments],
    ) -> LocalUpdate:
        """Add up the stage that the table lacks.

        Args:
            weights_d: The table so far, shape ``(d,)``.
            integers_m: None.
            arguments: See ``FitArguments``.

        Raises:
            ProtocolError: The table is complete.
            FederationError: The site does not answer for these places.
        """
        stage = self._table.due(weights_d)
        if stage is None:
            raise ProtocolError(
                f"round {arguments['round_index']} asks for statistics that are there"
            )
        first = self._table.stages[0]
        before: Sums = {}
        if stage is not first:
            before = self._table.read(first, weights_d)
            if self._noise is None:
                found = windows(self._table, before)
                self._note_places([at for _, _, at, _, _ in found])
        sums = sums_of(self._table, stage, self._columns, before)
        if self._noise is not None:
            noise = mechanism_of(self._table, stage, self._noise)
            exact = {name: np.array(part, np.int64) for name, part in sums.items()}
            noised = noise.release(exact, self._random_bytes)
            sums = {name: part.tolist() for name, part in noised.items()}
        elif self._least > 1:
            sums = hide_small(self._table, sums, self._columns, self._least, before)
        self._tell(self._told(arguments["round_index"], stage))
        return LocalUpdate(
            update_d=self._table.write(stage, sums),
            integers_m=integers_m,
            num_examples=self._columns.size,
            num_steps=1,
            training=None,
        )

    def _told(self, round_index: int, stage: Stage) -> str:
        """Say, for the site's operator, what is about to leave."""
        parts = ", ".join(f"{p.size:,} {p.name}" for p in stage.parts if p.most)
        names = ", ".join(column.name for column in self._table.columns)
        how = "exact" + ", without small cells" * (self._least > 1)
        if self._noise is not None:
            how = f"with noise of multiplier {self._noise:.4g}"
        return (
            f"answers statistics in round {round_index}: {parts} ({how}), of the "
            f"columns {names}"
        )

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
        max_loss: float | None = None,
    ) -> MetricSums:
        """Refuse: there is no model.

        Raises:
            ProtocolError: Always.
        """
        raise ProtocolError("was asked to evaluate, and statistics have no model")

    def spent(self) -> PrivacySpent | None:
        """Nothing: exact sums have no ledger."""
        return None
