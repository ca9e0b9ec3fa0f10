"""What both runs of an audit make for a site: its trainer, its plan and its ledger."""

from collections.abc import Callable, Mapping

from clients.privacy.site_plans import PrivateSites, SitePlan
from clients.training.local_federation import Federation, SiteData
from clients.training.trainer import TorchTrainer
from deploy.audit.rounds import throwaway_id
from federation.ids import SiteId
from federation.job.privacy_job import DifferentialPrivacySpec
from federation.protocols import Clock, Trainer
from privacy.dp import accountant
from privacy.dp.ledger.ledger import InMemoryLedger
from privacy.dp.ledger.ledger_format import Terms

PlanSites = Callable[[Federation, Clock], PrivateSites | None]


def meaning_of(private: DifferentialPrivacySpec) -> tuple[str, str]:
    """What neighbours differ in, and how steps sample."""
    if private.of_persons:
        return accountant.PERSON_RELATION, accountant.PERSON_SAMPLING
    return accountant.NEIGHBOURING_RELATION, accountant.SAMPLING_ASSUMPTION


def plans_of(private: PrivateSites | None) -> Mapping[SiteId, SitePlan]:
    """Plans of private sites; none where nothing is promised."""
    return {} if private is None else private.plans


def trainer_of(
    federation: Federation,
    name: SiteId,
    data: SiteData,
    plan: SitePlan | None,
    ledger: InMemoryLedger | None,
) -> Trainer:
    """Make a site's trainer as a run does."""
    train, held_out = data
    trainer = TorchTrainer(
        federation.job,
        name,
        pool=federation.pool,
        train=train,
        held_out=held_out,
        private=None if plan is None else plan.training,
    )
    if plan is None or ledger is None:
        return trainer
    return plan.budgeted(trainer, ledger)


def ledger_of(
    federation: Federation, name: SiteId, plan: SitePlan, clock: Clock
) -> InMemoryLedger:
    """Make a ledger that is not stored."""
    private = federation.job.privacy.differential_privacy
    terms = Terms(
        run_id=throwaway_id(),
        site=name,
        job_digest="0" * 64,
        delta=plan.delta,
        epsilon_cap=plan.epsilon_cap,
        unit=private.unit,
        relation=meaning_of(private)[0],
    )
    return InMemoryLedger(terms, clock=clock)
