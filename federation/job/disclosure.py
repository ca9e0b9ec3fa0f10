"""What a run's events may reveal, field by field: the one table.

Everything that shows a run (events.jsonl, terminal, report, result) reads events that
have passed ``conceal``. Each field of each event, and of the parts of events, has a
row; ``tests/unit/federation/test_disclosure.py`` refuses a field without one.

Sites use it too: ``withheld`` names what a site may not even send, because a curious
aggregator need not obey a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from federation.events import Event
from federation.job.spec import JobSpec


class Form(StrEnum):
    """The form in which a number about sites may exist."""

    SITE = "each site's own"
    SUM = "sums over sites"
    NEVER = "not at all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that fields share; where several settings apply, the strictest counts.

    Attributes:
        why: What the fields are.
        private: The form under differential privacy.
        secure: The form under secure aggregation.
        deployed: The form in a deployed run.
    """

    why: str
    private: Form = Form.SITE
    secure: Form = Form.SITE
    deployed: Form = Form.SITE

    def allowed(self, setting: "Exposure") -> Form:
        """The form under a setting."""
        forms = (
            self.private if setting.private else Form.SITE,
            self.secure if setting.secure else Form.SITE,
            self.deployed if setting.deployed else Form.SITE,
        )
        return max(forms, key=strictness)


def strictness(form: Form) -> int:
    """How strict a form is: 0 reveals the most."""
    return list(Form).index(form)


PUBLIC = Rule(why="known to all parties, or about the whole run")
TRAFFIC = Rule(why="what the aggregator sees of every message, masked or not")
SPENT = Rule(why="computed by a site from public settings")
DEALT = Rule(
    why="how a simulation splits the data", private=Form.NEVER, deployed=Form.NEVER
)
EXAMPLES = Rule(why="numbers of records", private=Form.NEVER, secure=Form.SUM)
INTRODUCED = Rule(
    why="numbers of records, signed by sites", private=Form.NEVER, secure=Form.NEVER
)
WORK = Rule(why="what a site reports about its work", secure=Form.NEVER)
# Under Poisson sampling time grows with the batches, whose sizes are private.
TIMES = Rule(
    why="time, energy and resources used", private=Form.NEVER, secure=Form.NEVER
)
SUMMED = Rule(why="exact statistics of a site", private=Form.NEVER, secure=Form.NEVER)
LOSSES = Rule(why="training losses", private=Form.NEVER, secure=Form.SUM)
RESULTS = Rule(why="held-out results, noised at the site", secure=Form.SUM)

_SITES, _SUMS = Form.SITE, Form.SUM

# By class, then by rule: the fields, and in which form they hold what they hold.
Rows = Mapping[tuple[Rule, Form], str]
TABLE: Mapping[str, Rows] = {
    "RunStarted": {
        (PUBLIC, _SUMS): "at run_id job_name rounds first_round sites parameters "
        "engine task secure_aggregation frozen classes weights relays relayed "
        "subgroups replicas"
    },
    "RunExtended": {
        (
            PUBLIC,
            _SUMS,
        ): "at last_round first_round rounds_before rounds job_before job joined"
    },
    "DataDistributed": {
        (PUBLIC, _SUMS): "at label_kind labels",
        (DEALT, _SITES): "shares",
    },
    "SitesIntroduced": {
        (PUBLIC, _SUMS): "at",
        (INTRODUCED, _SITES): "sites num_examples",
    },
    "PrivacyPlanned": {
        (PUBLIC, _SITES): "at unit relation accountant sampling holds_against "
        "signal_to_noise sites replaced withheld"
    },
    "CostPredicted": {(PUBLIC, _SUMS): "at bytes_down bytes_up seconds dollars"},
    "RoundStarted": {(PUBLIC, _SUMS): "at round_index cohort"},
    "LocalWorkChosen": {
        (PUBLIC, _SUMS): "at round_index first_step num_steps reason step_seconds "
        "waiting_seconds share target rounds steps seconds",
        (TIMES, _SITES): "train_seconds",
    },
    "SiteAnswered": {
        (PUBLIC, _SUMS): "at round_index site",
        (TRAFFIC, _SITES): "asked_seconds answered_seconds bytes_down bytes_up "
        "staleness",
        (EXAMPLES, _SITES): "num_examples",
        (WORK, _SITES): "num_steps weight",
        (TIMES, _SITES): "phases resources",
        (LOSSES, _SITES): "training",
        (RESULTS, _SITES): "evaluation",
        (SPENT, _SITES): "spent",
    },
    "SiteFailed": {
        (PUBLIC, _SITES): "at round_index site kind message",
        (TRAFFIC, _SITES): "asked_seconds answered_seconds bytes_down bytes_up",
    },
    "StepTaken": {
        (PUBLIC, _SUMS): "at round_index step sites",
        (TRAFFIC, _SITES): "bytes_down bytes_up",
    },
    "SitesLeftOut": {
        (PUBLIC, _SITES): "at round_index sites reasons standings returned times"
    },
    "GroupsCompared": {
        (PUBLIC, _SUMS): "at round_index groups norms distances remarks"
    },
    "ModelEvaluated": {
        (PUBLIC, _SUMS): "at round_index sites",
        (TRAFFIC, _SITES): "bytes_down bytes_up",
        (RESULTS, _SUMS): "pooled",
        (RESULTS, _SITES): "by_site",
        (SPENT, _SITES): "spent",
    },
    "RoundFinished": {
        (PUBLIC, _SUMS): "at round_index status asked answered failed bytes_down "
        "bytes_up inside_down inside_up seconds phases update_norm update_clip epsilon "
        "resources steps",
        (LOSSES, _SUMS): "training",
    },
    "CheckpointSaved": {(PUBLIC, _SUMS): "at round_index bytes_written seconds"},
    "CheckpointSkipped": {(PUBLIC, _SUMS): "at key reason"},
    "StoreUsed": {(PUBLIC, _SITES): "at url way uses who spared_calls spared_bytes"},
    "SiteSummed": {
        (PUBLIC, _SITES): "at site",
        (SUMMED, _SITES): "counts sums squares histograms categories",
    },
    "Warned": {(PUBLIC, _SUMS): "at message", (PUBLIC, _SITES): "awaited"},
    "ModelSelected": {
        (PUBLIC, _SUMS): "at round_index model models metric best_round stopped_early",
        (RESULTS, _SUMS): "best_score",
    },
    "SitesPaid": {(PUBLIC, _SUMS): "at sites", (TRAFFIC, _SITES): "dollars"},
    "RunFinished": {
        (PUBLIC, _SUMS): "at status rounds_completed last_round message seconds"
    },
}

# What events are made of; a row of an event judges the whole of it.
PARTS: Mapping[str, str] = {
    "SiteShare": "site cloud region train_examples held_out_examples counts",
    "SitePrivacy": "site epsilon_cap delta noise_multiplier sampling_rate "
    "steps_per_round held_out_noise",
    "StoreUse": "operation calls failed sent_bytes received_bytes seconds requests",
    # Names of metrics are those of the job; their sums are judged as losses are.
    "MetricSums": "count loss_sum metrics",
    "Phase": "name start_seconds seconds",
    "Resources": "busy_seconds cpu_seconds peak_memory_bytes method energy",
    "Energy": "joules grams method",
    "PrivacySpent": "epsilon delta held_out_epsilon anchor",
    "LedgerAnchor": "train evaluate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """What determines the form: differential privacy, secure aggregation, machines."""

    private: bool
    secure: bool
    deployed: bool

    @classmethod
    def of(cls, job: JobSpec, *, deployed: bool) -> "Exposure":
        """The setting of a run of a job."""
        privacy = job.privacy
        return cls(
            private=privacy.differential_privacy.enabled,
            secure=privacy.secure_aggregation.enabled,
            deployed=deployed,
        )


@cache
def hidden(kind: str, setting: Exposure) -> frozenset[str]:
    """Fields of a kind of event that a setting forbids."""
    return frozenset(
        name
        for (rule, holds), names in TABLE[kind].items()
        if strictness(holds) < strictness(rule.allowed(setting))
        for name in names.split()
    )


def forms(job: JobSpec) -> Mapping[str, Form]:
    """In which form each field of its answer leaves a site of a job."""
    setting = Exposure.of(job, deployed=True)
    return {
        name: rule.allowed(setting)
        for (rule, _), names in TABLE["SiteAnswered"].items()
        for name in names.split()
    }


def withheld(job: JobSpec) -> frozenset[str]:
    """Fields of its work that a site of a job does not send."""
    return hidden("SiteAnswered", Exposure.of(job, deployed=True))


def conceal(event: Event, setting: Exposure) -> Event:
    """Empty the fields that a setting forbids: a tuple to (), the rest to None."""
    gone = hidden(type(event).__name__, setting)
    if not gone:
        return event
    values = {name: getattr(event, name) for name in gone}
    empty = {k: () if isinstance(v, tuple) else None for k, v in values.items()}
    return replace(event, **empty)  # type: ignore[arg-type]
