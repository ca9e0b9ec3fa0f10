"""What a site requires of a job before it builds anything for it."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from clients.factories import import_factory
from clients.privacy.policy_spec import FILL_IN, UNITS, PolicySpec
from federation.errors import FederationError, JobError, SiteError, joined
from federation.ids import RunId, SiteId
from federation.job import code_files, job_digest, job_file
from federation.job.adapter_ranks import contributors, fewest_contributors
from federation.job.metrics import BUILT_IN, TRAINER, is_function
from federation.job.spec import JobSpec
from federation.job.statistics_checks import table as table_of
from federation.job.statistics_table import Table
from federation.rounds.local_work import bounds, is_by_capacity, leaves_steps_open
from federation.vectors import Layout
from federation.wire.frame import MAX_TEXT_CHARS
from privacy.secagg.agreement.code_hash import code_hash
from privacy.secagg.agreement.contract import colluding_tolerated
from privacy.secagg.agreement.policy import LocalPolicy
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.arithmetic.noise_shares import NoiseShare
from privacy.secagg.protocol.of_job import header_slots, relays_of, terms_of_job

_OF_TEXT = re.compile(r"\.(length|has\..+)$")  # Columns that follow from a text.
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z]\w*")
_UNIT = "privacy.differential_privacy.unit"
_TARGET = "privacy.differential_privacy.target_epsilon"
_DELTA = "privacy.differential_privacy.delta"
_HELD_OUT = "privacy.differential_privacy.held_out"
_SECURE = "privacy.secure_aggregation.enabled"
_COLLUDING = "privacy.differential_privacy.colluding_sites"
_CLIP = "privacy.secure_aggregation.clip_norm"
_THRESHOLD = "privacy.secure_aggregation.threshold"
_HYBRID = "privacy.secure_aggregation.hybrid"
_ELEMENT = "privacy.secure_aggregation.element_bound"
_RING = "privacy.secure_aggregation.ring_bits"
_LEVELS = "privacy.secure_aggregation.levels"
_WEIGHTS = "aggregation.weights"
_PAIR = 2

# Before an operator changes a value of ``site.toml``, by its dotted key.
_CAUTIONS = {
    "policy.functions": "read what they do first",
    "policy.max_delta": f"or leave it, and have the job set {_DELTA}",
    "data.source": "what loads this site's own data; read what it does first",
    "data.options": "all its arguments by name; check each",
    "data.preprocessing": (
        '"none": each record is prepared separately; "public": with constants from '
        'elsewhere; "own" (unit site only): with statistics of this site. Delete this '
        "line if the function declares it"
    ),
}
_SHARE = "# without source, the site trains on its share of the job's dataset"

# The key of the job, what is wrong, and values of ``[policy]`` that would accept it.
_Faults = Iterator[tuple[str, str, Mapping[str, Any]]]


def check_job(
    job: JobSpec, policy: PolicySpec, site: SiteId, *, has_data: bool = False
) -> None:
    """Check a job against the requirements of a site's operator.

    ``privacy.secagg.agreement.policy`` checks the contract again; this reports all
    faults before the first round, by the keys of the job.

    Args:
        job: As it was proposed.
        policy: What the operator requires.
        site: The site's name.
        has_data: Whether the site has data of its own: then it calls no source of the
            job, and these need not be accepted.

    Raises:
        JobError: The site does not take part; ``key`` is the first key of the job. With
            its remedy the policy accepts the job, if a policy can.
    """
    if site not in {spec.name for spec in job.sites}:
        raise JobError(f"site {site!r} is not named by this job", key="sites")
    rules = (
        *(_privacy_faults, _secrecy_faults, _work_faults, _sum_faults),
        _statistics_faults,
    )
    faults = _errors((fault for rule in rules for fault in rule(job, policy)), site)
    faults += function_faults(job, policy, site, has_data=has_data)
    if faults:
        raise joined(faults)


def rehearses(job: JobSpec, site: SiteId) -> bool:
    """Whether a site without data of its own has a part of the job's dataset.

    It loads nothing that the job names for single sites, and opens no address that
    someone else gives it.
    """
    is_dealt = any(each.name == site and each.data is None for each in job.sites)
    return is_dealt and job.data is not None and "://" not in job.data.source


def function_faults(
    job: JobSpec, policy: PolicySpec, site: SiteId, *, has_data: bool
) -> list[JobError]:
    """Return why the site may not call what a job names: one fault for each key.

    Arguments as for ``check_job``.
    """
    loads_data = not has_data and rehearses(job, site)
    return _errors(_function_faults(job, policy, loads_data=loads_data), site)


def _errors(
    faults: Iterable[tuple[str, str, Mapping[str, Any]]], site: SiteId
) -> list[JobError]:
    return [
        JobError(
            f"site {site!r} {fault}",
            key=key,
            remedy={f"policy.{name}": value for name, value in remedy.items()},
        )
        for key, fault, remedy in faults
    ]


@dataclass(kw_only=True)
class Faults:
    """Everything that keeps a site from a run, so that it is mended at once.

    Attributes:
        job: As it was proposed.
        site: The site's name.
        has_data: Whether the site has data of its own.
        is_unseen: Whether the job is private and the site's data could not be loaded,
            so that no one knows whether they are within the limits.
        errors: What was found.
        remedy: Values of ``site.toml`` that would accept the job, by dotted key.
        own_data: Those with which the site would train on data of its own.
    """

    job: JobSpec
    site: SiteId
    has_data: bool
    is_unseen: bool = False
    errors: list[FederationError] = field(default_factory=list)
    remedy: dict[str, Any] = field(default_factory=dict)
    own_data: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error of the block in place of raising it."""
        try:
            yield
        except (JobError, SiteError) as error:
            self.errors.append(error)

    def may_call(self, policy: PolicySpec) -> bool:
        """Whether everything that the site would call is accepted and present.

        A file that is missing, or is not the one of the job, is noted.
        """
        site, has_data = self.site, self.has_data
        loads_data = not has_data and rehearses(self.job, site)
        named = _named_functions(self.job, loads_data=loads_data)
        files = {
            file.path: (key, file)
            for key, text in reversed(named)
            if (file := code_files.parse(text)) and file.digest
        }
        may_call = not function_faults(self.job, policy, site, has_data=has_data)
        for key, file in files.values():
            try:
                file.sources()
            except JobError as error:
                may_call, advice = False, "put the file of the job's author "
                told = f"{error.outside}: {advice}beside site.toml at site {site!r}"
                here = f"{error.reason}; {advice}there"
                self.errors.append(JobError(here, key=key, outside=told))
        return may_call

    def check(self) -> None:
        """Raise one error for all that was noted.

        Its notes are for the site's log: what the operator does to accept the job, with
        lines for ``site.toml``. They say what else the operator accepts, and where the
        site's files are, so they stay at the site.

        Raises:
            FederationError: Something was noted.
        """
        if not self.errors:
            return
        error = self.errors[0]
        for each in self.errors:
            if isinstance(each, JobError):
                self.remedy |= each.remedy
        if len(self.errors) > 1 or self.remedy:
            outside = _all_of([each.outside for each in self.errors], "; also ")
            advice = ". Its log has the lines for site.toml" if self.remedy else ""
            room = MAX_TEXT_CHARS - len(advice)
            if len(outside) > room:  # The advice is not what is cut off on the way.
                outside = f"{outside[: room - 3]}..."
            here = _all_of([*map(str, self.errors)], ";\nalso ")
            error = JobError(here, outside=outside + advice)
        for line in self._advice():
            error.add_note(line)
        raise error

    def _advice(self) -> Iterator[str]:
        if self.is_unseen:
            yield (
                "the site's data were not loaded: policy.total_epsilon is checked once "
                "it can be"
            )
        values = {**self.own_data, **self.remedy}
        if not values:
            return
        intro = (
            "to accept such a job, decide on each of these keys and change it in the "
            f"table that site.toml has, with a value for each {FILL_IN!r}; do not "
            "restart the agent, which reads [policy] and [data] again for the next run:"
        )
        block = [intro]
        for table in ("policy", "data"):
            lines = [*_lines(table, values)]
            if table == "data" and self.own_data and rehearses(self.job, self.site):
                lines.insert(0, _SHARE)
            block += [f"[{table}]", *lines] if lines else ()
        yield "\n  ".join(block)


def _lines(table: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Write the values of one table of ``site.toml``, each with its caution."""
    for key, value in values.items():
        where, _, name = key.partition(".")
        if where == table:
            caution = _CAUTIONS.get(key)
            yield f"{name} = {_toml(value)}{f'  # {caution}' if caution else ''}"


def _toml(value: Any) -> str:
    if not isinstance(value, Mapping):
        return json.dumps(value)
    inner = ", ".join(
        # The aggregator chooses the names, and an operator pastes the line.
        f"{name if name.isidentifier() and name.isascii() else json.dumps(name)} = "
        f"{_toml(each)}"
        for name, each in value.items()
    )
    return f"{{ {inner} }}" if inner else "{}"


def _all_of(faults: Sequence[str], separator: str) -> str:
    """Join what is wrong; a key of the job that has been named is not repeated."""
    told = ""
    for text in faults:
        key, _, reason = text.partition(": ")
        told += f"{separator if told else ''}{reason if f'{key}: ' in told else text}"
    return told


def check_work(job: JobSpec, policy: PolicySpec, site: SiteId) -> None:
    """Check how much work a job asks of a site: the part that needs no code of theirs.

    Raises:
        JobError: The site does not take part; ``key`` is the key of the job.
    """
    faults = _errors(_work_faults(job, policy), site)
    if faults:
        raise joined(faults)


def check_delta(policy: PolicySpec, site: SiteId, delta: float) -> None:
    """Check the delta that a site comes to, from its number of records or the job.

    Raises:
        JobError: The policy allows less.
    """
    if policy.demands_privacy and delta > policy.max_delta:
        raise JobError(
            f"comes to {delta:.1e} at site {site!r}, which allows "
            f"{policy.max_delta:g} (policy.max_delta): set it to {policy.max_delta:g} "
            "in the job",
            key=_DELTA,
            remedy={"policy.max_delta": delta},
        )


def contract_policy(
    job: JobSpec,
    layout: Layout,
    *,
    run_id: RunId,
    policy: PolicySpec,
    roster: Roster,
    noise_share: NoiseShare | None,
) -> LocalPolicy:
    """The operator's requirements of the contract of an accepted job.

    Args:
        job: The job as it was proposed.
        layout: Layout of the site's own model.
        run_id: The run that was proposed.
        policy: What the operator demands.
        roster: Whom the site trusts.
        noise_share: What the site counts on of the noise inside the sum; None if
            there is none.

    Raises:
        JobError: The job does not say how many examples a site has at most.
    """
    return LocalPolicy(
        roster=roster,
        run_id=run_id,
        job_digest=job_digest.digest(job),
        code_hashes=frozenset({code_hash()}),
        layout_digest=bytes.fromhex(layout.digest),
        num_values=layout.size,
        sites=frozenset(SiteId(site.name) for site in job.sites),
        terms=_terms(job),
        min_sites=policy.fewest_in_sum(job.smallest_cohort),
        colluding=policy.colluding_sites,
        ring_bits=frozenset(policy.ring_bits),
        levels=frozenset(policy.levels),
        max_clip_norm=policy.max_clip_norm,
        max_element_bound=policy.max_element_bound,
        weight_rules=frozenset(policy.weight_rules),
        # That of the job, which was accepted: where a contract claims more than its
        # job does, the claim would lift the rule for two sites.
        privacy_profiles=frozenset({job.privacy.differential_privacy.unit}),
        epsilon_cap=policy.max_epsilon if policy.demands_privacy else math.inf,
        max_delta=policy.max_delta if policy.demands_privacy else 1.0,
        max_rounds=policy.max_rounds + 1,
        header_slots=header_slots(job),
        noise_share=noise_share,
        relays=relays_of(job, roster),
        accept_two_sites=policy.accept_two_sites,
        require_hybrid=policy.require_hybrid,
    )


def _terms(job: JobSpec) -> dict[str, Any]:
    """The contract's fields that follow from the job, literally."""
    found = terms_of_job(job)
    if not job.has_groups:
        found |= {"threshold": job.minimum_sites, "min_sites": job.minimum_sites}
    return found


def weakness_of(job: JobSpec, policy: PolicySpec, delta: float | None) -> str:
    """Say why a private job's guarantee is too weak to count; empty if it counts.

    Whatever unit the operator demands: with epsilon large enough, or delta close to 1,
    an aggregator could call any job private.

    Args:
        job: With differential privacy.
        policy: What the operator demands.
        delta: What the site promises with the job's epsilon; None for less than any.
    """
    private = job.privacy.differential_privacy
    target = private.target_epsilon
    if target is None or target > policy.max_epsilon:
        return f"its epsilon is above {policy.max_epsilon:g} (policy.max_epsilon)"
    if delta is not None and delta > policy.max_delta:
        return f"its delta is above {policy.max_delta:g} (policy.max_delta)"
    is_public = private.held_out == "public" and job.evaluation.every > 0
    if is_public and not policy.public_held_out:
        return "it declares held-out data public (policy.public_held_out)"
    return ""


def accepted_units(policy: PolicySpec) -> tuple[str, ...]:
    """Units of privacy that are as strong as the policy's, or stronger."""
    return UNITS[UNITS.index(policy.privacy) :]


def _privacy_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    private = job.privacy.differential_privacy
    if private.unit not in accepted_units(policy):
        demand = f"requires {policy.privacy!r} (policy.privacy)"
        given = f"but the job has {private.unit!r}"
        yield _UNIT, f"{demand}, {given}", {"privacy": private.unit}
    if not policy.demands_privacy:
        return
    if private.held_out == "public" and not policy.public_held_out:
        demand = "does not declare its held-out data public (policy.public_held_out)"
        yield _HELD_OUT, f"{demand}: choose 'noise'", {"public_held_out": True}
    target, delta = private.target_epsilon, private.delta
    if target is not None and target > policy.max_epsilon:
        demand = f"allows {policy.max_epsilon:g} (policy.max_epsilon)"
        yield _TARGET, f"{demand}, but the job has {target:g}", {"max_epsilon": target}
    if delta is not None and delta > policy.max_delta:
        demand = f"allows {policy.max_delta:g} (policy.max_delta)"
        yield _DELTA, f"{demand}, but the job has {delta:g}", {"max_delta": delta}


def _secrecy_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    if policy.secure_aggregation and not job.privacy.secure_aggregation.enabled:
        demand = "requires secure aggregation (policy.secure_aggregation)"
        yield _SECURE, demand, {"secure_aggregation": False}


def _work_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    """Rounds, steps or epochs of a round, and batches of a step."""
    if job.rounds > policy.max_rounds:
        demand = f"allows {policy.max_rounds} (policy.max_rounds)"
        given = f"but the job has {job.rounds}"
        yield "rounds", f"{demand}, {given}", {"max_rounds": job.rounds}
    limit, most = policy.max_local_steps, bounds(job)[1]
    if limit is not None and most > limit:
        key = (
            "schedule.max_local_steps"
            if leaves_steps_open(job)
            else "training.local_steps"
        )
        demand = f"allows {limit} local steps a round (policy.max_local_steps)"
        yield key, demand, {"max_local_steps": most}
    privacy = job.privacy
    is_bare = not privacy.differential_privacy.enabled  # Noise bounds what sums tell.
    is_shown = privacy.secure_aggregation.enabled and is_by_capacity(job)
    if is_shown and is_bare and not policy.accept_dropouts:
        demand = (
            "does not accept that sums of different rounds differ by single sites "
            "(policy.accept_dropouts), as those do whose sites change their local steps"
        )
        yield "schedule.allocation", demand, {"accept_dropouts": True}
    epochs, limit = job.training.local_epochs, policy.max_local_epochs
    if epochs is not None and limit is not None and epochs > limit:
        demand = f"allows {limit} local epochs a round (policy.max_local_epochs)"
        yield "training.local_epochs", demand, {"max_local_epochs": epochs}
    yield from _batch_faults(job, policy)


def _batch_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    """How many batches a step takes, in any round."""
    training, most = job.training, policy.max_accumulate
    given = {"training.accumulate": training.accumulate}
    for index, (_, value) in enumerate(training.accumulate_from):
        given[f"training.accumulate_from[{index}]"] = value
    for key, value in given.items():
        if value > most:
            demand = f"allows {most} batches a step (policy.max_accumulate)"
            yield key, demand, {"max_accumulate": max(given.values())}


def _sum_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    """How well the secure sum hides an update, and how much is in it."""
    if not job.privacy.secure_aggregation.enabled:
        return
    yield from _arithmetic_faults(job, policy)
    yield from _number_faults(job, policy)
    yield from _noise_faults(job, policy)
    if policy.require_hybrid and not job.privacy.secure_aggregation.hybrid:
        demand = "requires the post-quantum hybrid (policy.require_hybrid)"
        yield _HYBRID, demand, {"require_hybrid": False}


def _number_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    """With how many others an update is summed."""
    num_sites, fewest = job.smallest_cohort, job.sites_in_sum
    of_sites, threshold = num_sites, _THRESHOLD
    if job.has_free_cohorts:
        of_sites, threshold = len(job.sites), "schedule.buffer_size"
    yield from _rank_faults(job, policy)
    if num_sites == _PAIR:
        private = job.privacy.differential_privacy
        hides = private.by_itself and not weakness_of(job, policy, private.delta)
        if not hides and not policy.accept_two_sites:
            demand = "requires record-level privacy in a run of two"
            remedy: dict[str, Any] = {"accept_two_sites": True}
            yield _UNIT, f"{demand} (policy.accept_two_sites)", remedy
    demanded = policy.fewest_in_sum(num_sites)
    if fewest < demanded:
        given = f"but this job allows sums over {fewest} of {of_sites}"
        key = "sites" if fewest == of_sites else threshold
        demand = f"requires {demanded} in a sum (policy.min_sites)"
        yield key, f"{demand}, {given}", {"min_sites": max(fewest, _PAIR)}
    tolerated = colluding_tolerated(num_sites, fewest)
    if tolerated < policy.colluding_sites:
        demand = f"requires protection against {policy.colluding_sites} colluding sites"
        given = f"{fewest} of {of_sites} protect against {tolerated}"
        remedy = {"colluding_sites": tolerated}
        yield threshold, f"{demand} (policy.colluding_sites), but {given}", remedy


def _rank_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    """With how many others the largest ranks of an update are summed."""
    if not contributors(job):
        return
    fewest, demanded = fewest_contributors(job), policy.fewest_in_sum(len(job.sites))
    index = next(i for i, site in enumerate(job.sites) if site.lora_rank is not None)
    if fewest < max(demanded, policy.colluding_sites + _PAIR):
        demand = f"requires {demanded} in a sum (policy.min_sites), and two without "
        given = f"those of policy.colluding_sites; the largest ranks have {fewest}"
        remedy = {}
        if fewest >= _PAIR:
            colluding = min(policy.colluding_sites, fewest - _PAIR)
            remedy = {"min_sites": fewest, "colluding_sites": colluding}
        yield f"sites[{index}].lora_rank", demand + given, remedy


def _arithmetic_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    """How updates are weighed and rounded."""
    secure, weights = job.privacy.secure_aggregation, job.aggregation.weights
    if job.update_clip_norm > policy.max_clip_norm:
        demand = f"allows {policy.max_clip_norm:g} (policy.max_clip_norm)"
        yield _CLIP, demand, {"max_clip_norm": job.update_clip_norm}
    bound = secure.element_bound or job.update_clip_norm
    if policy.max_element_bound is not None and bound > policy.max_element_bound:
        demand = f"allows {policy.max_element_bound:g} (policy.max_element_bound)"
        remedy: dict[str, Any] = {"max_element_bound": bound}
        yield _ELEMENT, f"{demand}, but the job has {bound:g}", remedy
    if secure.ring_bits not in policy.ring_bits:
        accepted = ", ".join(map(str, policy.ring_bits))
        demand = f"accepts rings of {accepted} bits (policy.ring_bits)"
        yield _RING, demand, {"ring_bits": [*policy.ring_bits, secure.ring_bits]}
    if secure.levels is not None and secure.levels not in policy.levels:
        accepted = ", ".join(map(str, policy.levels))
        rule = f"accepts sums in {accepted} levels" if accepted else "accepts no levels"
        remedy = {"levels": [*policy.levels, secure.levels]}
        yield _LEVELS, f"{rule} (policy.levels)", remedy
    if weights not in policy.weight_rules:
        accepted = ", ".join(map(repr, policy.weight_rules))
        demand = f"accepts the weights {accepted} (policy.weight_rules)"
        yield _WEIGHTS, demand, {"weight_rules": [*policy.weight_rules, weights]}


def _statistics_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    """Which columns are asked about, and how."""
    if job.statistics is None:
        return
    allowed, asked = policy.statistics, table_of(job)
    target = job.privacy.differential_privacy.target_epsilon or 0.0
    most = allowed.max_epsilon or target
    hidden = [
        column
        for column in asked.columns
        if not any(fnmatchcase(column.name, each) for each in allowed.columns)
    ]
    parts = [p.name for p in asked.stages[0].parts if p.most]
    refused = [name for name in parts if name not in allowed.kinds]
    remedy = {
        "statistics": {
            "columns": [*allowed.columns, *(column.name for column in hidden)],
            "kinds": [*allowed.kinds, *refused],
            **({"max_epsilon": target} if target > most else {}),
        }
    }
    if allowed.min_count > 1 and not job.privacy.differential_privacy.enabled:
        yield from _overlap_faults(asked)
    if hidden:
        names = ", ".join(f"{column.name!r:.80}" for column in hidden)
        demand = "answers nothing about (policy.statistics.columns)"
        yield hidden[0].place, f"{demand}: {names}", remedy
    if refused:
        demand = f"gives no {', '.join(refused)} (policy.statistics.kinds)"
        yield "statistics", demand, remedy
    if target > most:
        demand = f"allows {most:g} for statistics (policy.statistics.max_epsilon)"
        yield _TARGET, f"{demand}, but the job has {target:g}", remedy


def _overlap_faults(asked: Table) -> _Faults:
    """Cells that overlap: their differences are small, however large each is."""
    cells = dict[str, int]()
    for column in asked.columns:
        spec, of = column.spec, _OF_TEXT.sub("", column.name)
        kinds = (spec.categories, spec.bin_edges, spec.quantiles)
        cells[of] = cells.get(of, 0) + sum(map(bool, kinds))
        if cells[of] > 1:
            demand = (
                "shows no small cells (policy.statistics.min_count), and those of "
                f"column {of!r:.80} would overlap: ask for its categories, its "
                "histogram or its quantiles alone, or use "
                "privacy.differential_privacy"
            )
            yield column.place, demand, {}


def _noise_faults(job: JobSpec, policy: PolicySpec) -> _Faults:
    """Against how many sites the noise holds that adds up inside the sum."""
    private = job.privacy.differential_privacy
    if private.in_sum and private.colluding_sites < policy.colluding_sites:
        demand = f"requires noise that {policy.colluding_sites} colluding sites cannot "
        counted = f"remove (policy.colluding_sites), not {private.colluding_sites}"
        remedy = {"colluding_sites": private.colluding_sites}
        yield _COLLUDING, demand + counted, remedy


def _named_functions(job: JobSpec, *, loads_data: bool) -> list[tuple[str, str]]:
    """What the site would call, with the keys of the job that name it."""
    named = [("model.factory", job.model.factory)]
    if job.training.task not in {*BUILT_IN, TRAINER}:
        named.append(("training.task", job.training.task))
    for table in ("optimizer", "learning_rate"):
        name = getattr(job.training, table).name
        if is_function(name):
            named.append((f"training.{table}.name", name))
    # No site loads what the job names for single sites: ``site_host.data``.
    sites = tuple(replace(site, data=None) for site in job.sites)
    job = replace(job, data=job.data if loads_data else None, sites=sites)
    if job.data is not None:
        named.append(("data.source", job.data.source))
    # All texts that `import_factory` would take, wherever they are: our own functions
    # import names from their options, and a user's may do so.
    texts = [
        (key, text)
        for key, text in code_files.texts(job_file.document(job))
        if key not in code_files.AGGREGATORS
    ]
    return named + [(key, text) for key, text in texts if is_function(text)]


def _function_faults(job: JobSpec, policy: PolicySpec, *, loads_data: bool) -> _Faults:
    """What the site would call and does not accept."""
    listed = [*policy.functions]
    for key, function in _named_functions(job, loads_data=loads_data):
        try:
            accepted = is_accepted(function, policy.functions)
        except JobError as error:
            yield key, f"has no such function: {error.reason}", {}
            continue
        name = code_files.unpinned(function)
        if accepted:
            continue
        fault = f"does not accept {name!r} (policy.functions)"
        if code_files.parse(function) and name == function:
            # No list accepts it: its author's job is the one to mend first.
            fault += ", whose file was missing or not Python when the job was loaded"
        if key == "data.source":
            fault += ", which it would call because data.source in site.toml is unset"
        listed += [] if name in listed else [name]
        is_new = name not in policy.functions
        yield key, fault, {"functions": [*listed]} if is_new else {}


def is_accepted(function: str, accepted: tuple[str, ...]) -> bool:
    """Whether a job may name a function.

    Nothing is imported but modules of which every function is accepted. A file must be
    pinned: it is loaded only if the site's own file is the one that the job names.

    Raises:
        JobError: Such a module has no such function.
    """
    file = code_files.parse(function)
    if file is not None and file.digest:
        return function in accepted or code_files.unpinned(function) in accepted
    if not _FUNCTION.fullmatch(function):
        return False
    if function in accepted:
        return True
    module = function.partition(":")[0]
    if f"{module}:*" not in accepted:
        return False
    # A module also holds what it has imported, which nobody meant.
    return getattr(import_factory(function), "__module__", None) == module
