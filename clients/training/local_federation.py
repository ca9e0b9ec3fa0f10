"""Model and data of a job on one machine, ready for its sites."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from clients.data import Dataset
from clients.models.model_pool import ModelPool
from clients.models.starting_weights import check_first
from clients.statistics.trainer import StatisticsTrainer
from clients.training.kept_steps import KeptSteps
from clients.training.site import Report, Seal, Site, log
from clients.training.site_state import SiteState
from clients.training.trainer import TorchTrainer, never
from clients.training.users_loop import LoopTrainer
from federation.compression.apart import fitted
from federation.ids import SiteId
from federation.job.adapter_ranks import links_of
from federation.job.disclosure import withheld
from federation.job.kept_state import KEPT_ROUNDS, keepers
from federation.job.metrics import TRAINER
from federation.job.spec import JobSpec
from federation.job.statistics_checks import table
from federation.protocols import Clock, ObjectStore, Trainer
from federation.resources import CLOCK, UsageMeter
from federation.rounds.local_work import check_task, leaves_steps_open
from federation.rounds.server_optimizer import server_optimizer
from federation.vectors import Allocate, Layout, in_memory

SiteData = tuple[Dataset, Dataset]


def state_of(
    job: JobSpec,
    layout: Layout,
    site: SiteId,
    store: ObjectStore,
    allocate: Allocate = in_memory,
) -> SiteState:
    """Make what a site keeps of a run between rounds."""
    optimizer, links = job.training.optimizer, fitted(job.communication.links, layout)
    is_secret = job.privacy.secure_aggregation.enabled
    return SiteState(
        site,
        layout,
        store,
        rounds=KEPT_ROUNDS if is_secret else job.storage.keep_checkpoints + 1,
        allocate=allocate,
        carries=optimizer.name if optimizer.state == "keep" else "",
        # Steps that were taken decide only what a site refuses.
        continues=bool(keepers(job, layout)) or leaves_steps_open(job),
        codec=links.up.name if links.feedback else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Federation:
    """Model and data of a job, ready for its sites.

    Attributes:
        pool: The model.
        site_data: Training and held-out data of each site, in the job's order.
        order_seed: Of the order of examples and of what models draw in training, in
            place of the job's seed; secret. None for the job's.
        ends_early: Whether a site takes no more steps of its round; see
            ``TorchTrainer``.
        kept_steps: Keeps the steps of a round that a site cannot end; see there.
        allocate: Makes vectors of what a site's updates have left out.
        least_count: Fewest records of a site in a cell of exact statistics.
        tell: Takes what a site answers to jobs of statistics, for its operator.
        note_places: Takes where exact statistics look for quantiles; it may refuse.
    """

    job: JobSpec
    pool: ModelPool
    site_data: Mapping[SiteId, SiteData]
    order_seed: int | None = field(default=None, repr=False)
    ends_early: Callable[[], bool] = never
    kept_steps: KeptSteps | None = None
    allocate: Allocate = in_memory
    least_count: int = 1
    tell: Callable[[str], None] = logging.getLogger(__name__).info
    note_places: Callable[[Sequence[int]], None] = lambda _: None

    def trainer(self, name: SiteId) -> Trainer:
        """Make a site's trainer, without privacy for single records."""
        if self.job.training.task == TRAINER:
            return self.loop_trainer(name, self.site_data[name])
        if self.job.statistics is not None:
            return self.statistics_trainer(name)
        train, held_out = self.site_data[name]
        return TorchTrainer(
            self.job,
            name,
            pool=self.pool,
            train=train,
            held_out=held_out,
            seed=self.order_seed,
            ends_early=self.ends_early,
            kept_steps=self.kept_steps,
        )

    def loop_trainer(self, name: SiteId, data: SiteData) -> LoopTrainer:
        """Make a site's trainer whose loop is the user's own."""
        train, held_out = data
        return LoopTrainer(
            self.job,
            name,
            pool=self.pool,
            train=train,
            held_out=held_out,
            seed=self.order_seed,
            ends_early=self.ends_early,
        )

    def statistics_trainer(
        self, name: SiteId, noise_multiplier: float | None = None
    ) -> StatisticsTrainer:
        """Make what answers a job of statistics at a site.

        Raises:
            SiteError: Its records lack columns, or have others than the job says.
        """
        train, _ = self.site_data[name]
        return StatisticsTrainer(
            table(self.job),
            name,
            layout=self.pool.layout,
            train=train,
            noise_multiplier=noise_multiplier,
            least_count=self.least_count,
            tell=self.tell,
            note_places=self.note_places,
        )

    def site(
        self,
        name: SiteId,
        *,
        make_trainer: Callable[[], Trainer],
        store: ObjectStore,
        clock: Clock,
        meter: UsageMeter = CLOCK,
        seal: Seal | None = None,
        tells_all: bool = True,
        report: Report = log,
        works_ahead: bool = False,
    ) -> Site:
        """Make one site; ``store`` is where it keeps what never leaves it."""
        links = links_of(self.job, self.pool.layout, self.pool.ranks.get(name))
        return Site(
            name,
            make_trainer=make_trainer,
            state=state_of(self.job, self.pool.layout, name, store, self.allocate),
            clock=clock,
            meter=meter,
            withheld=withheld(self.job),
            seal=seal,
            links=links,
            optimizer=server_optimizer(self.job.aggregation.server_optimizer),
            check_first=partial(check_first, self.job, self.pool),
            check_work=partial(check_task, self.job),
            tells_all=tells_all,
            report=report,
            works_ahead=works_ahead and self.job.training.overlap_steps > 0,
        )
