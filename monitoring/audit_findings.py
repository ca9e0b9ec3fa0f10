"""An audit's findings, as values, as JSON and in a few lines.

Shape suffixes: m canaries.
"""

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.epsilon_text import format_epsilon
from monitoring.units import format_delta
from privacy.dp.auditing import Guesses, Roc, p_value
from privacy.dp.curve_tests import PValues

# Tests that decide about a promise share the risk of a false alarm, as audited sites
# do, so that the whole audit has the confidence: three have the first part each, and
# two of the steps the second, since their faults leave far smaller p-values.
_SHARE, _SHARE_OF_STEPS = 0.33, 0.005

# Training without noise would be called broken if its expected p-value is so much
# below what that takes, since the one that is found varies.
_MARGIN = 0.1

FALSE_POSITIVES = (0.001, 0.01)  # At which membership inference is reported.


class Verdict(enum.StrEnum):
    """An audit's verdict on a site's promise."""

    NONE = "no guarantee"
    BROKEN = "BROKEN"
    INCONCLUSIVE = "inconclusive"
    NOT_BROKEN = "not broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The promise in a site's ledger of the audited run.

    Attributes:
        epsilon: Spent on training records; infinite without differential privacy.
        delta: The probability that goes with it, or that the audit assumes.
        terms: Unit, neighbouring relation, accountant and sampling, for people.
    """

    epsilon: float
    delta: float
    terms: str

    @property
    def is_private(self) -> bool:
        """Whether anything is promised."""
        return math.isfinite(self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Membership inference by loss against two models.

    Attributes:
        final: Against the global model after the last round.
        local: Against what the site itself sent last; None if that is never seen.
    """

    final: Roc
    local: Roc | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFindings:
    """Tests of the trade-off curve of all that a site's ledger was charged.

    Attributes:
        guesses: How canaries were distinguished for ``one_run``.
        p_values: What the tests found.
        without_noise: What they would have found without any noise.
        repeated_noise: P-value of the noise's independence between rounds.
        sampling: P-value of the steps' sampling.
    """

    guesses: Guesses
    p_values: PValues
    without_noise: PValues
    repeated_noise: float
    sampling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFindings:
    """The audit's findings on one site.

    Attributes:
        site: Its name.
        promise: What the guarantee says.
        guesses: How canaries were distinguished for the bound on epsilon.
        curve: Tests of the trade-off curve; None where nothing is promised.
        num_audited: Number of audited sites, which share the risk of a false alarm.
        confidence: Of the audit, and of each bound by itself: if all promises are kept,
            any of them is called broken with a probability of at most one minus it.
        scores_m: Score of each canary, shape ``(m,)``.
        is_in_m: Whether it was in the data, shape ``(m,)``.
        canaries: How well canaries' scores tell who was in.
        independent_bound: Bound on epsilon that holds if canaries do not influence
            each other; see ``privacy.dp.auditing.epsilon_of_independent``.
        membership: Attacks on the site's real records.
    """

    site: str
    promise: Promise
    guesses: Guesses
    curve: CurveFindings | None
    num_audited: int
    confidence: float
    scores_m: NDArray[np.float64]
    is_in_m: NDArray[np.bool_]
    canaries: Roc
    independent_bound: float
    membership: Membership

    @property
    def bound(self) -> float:
        """Lower bound on epsilon, at the confidence by itself."""
        return self.guesses.epsilon(
            delta=self.promise.delta, confidence=self.confidence
        )

    @property
    def largest_bound(self) -> float:
        """The bound if every guess were right."""
        return self.guesses.largest_epsilon(
            delta=self.promise.delta, confidence=self.confidence
        )

    @property
    def p_value(self) -> float:
        """Probability of such findings, at most, if all promises hold.

        Of all tests of all audited sites together (Bonferroni, with unequal parts).
        """
        found = [self._p_value_of(self.guesses.correct)]
        of_steps = [1.0]
        if self.curve is not None:
            found += [self.curve.p_values.one_run, self.curve.p_values.independent]
            of_steps = [self.curve.repeated_noise, self.curve.sampling]
        return self._together(min(found) / _SHARE, min(of_steps) / _SHARE_OF_STEPS)

    @property
    def p_value_without_noise(self) -> float:
        """The p-value to expect of training without any noise."""
        if self.curve is None:
            return self._together(self._p_value_of(self.guesses.guesses) / _SHARE)
        clear = self.curve.without_noise
        return self._together(min(clear.one_run, clear.independent) / _SHARE)

    def _together(self, *of_tests: float) -> float:
        return min(1.0, self.num_audited * min(of_tests))

    def _p_value_of(self, correct: int) -> float:
        if not self.promise.is_private:
            return 1.0
        return p_value(
            self.guesses.canaries,
            self.guesses.guesses,
            correct,
            epsilon=self.promise.epsilon,
            delta=self.promise.delta,
        )

    @property
    def verdict(self) -> Verdict:
        """The verdict on the promise.

        ``BROKEN`` if the p-value is below one minus the confidence. If even training
        without any noise would not have been called so, ``INCONCLUSIVE``.
        """
        if not self.promise.is_private:
            return Verdict.NONE
        if self.p_value < 1 - self.confidence:
            return Verdict.BROKEN
        if self.p_value_without_noise >= _MARGIN * (1 - self.confidence):
            return Verdict.INCONCLUSIVE
        return Verdict.NOT_BROKEN

    @property
    def is_broken(self) -> bool:
        """Whether the attack learned more than the promise allows."""
        return self.verdict is Verdict.BROKEN

    @property
    def is_inconclusive(self) -> bool:
        """Whether no attack of this size could have contradicted the promise."""
        return self.verdict is Verdict.INCONCLUSIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFindings:
    """An audit's findings.

    Attributes:
        unit: Its unit of privacy.
        num_sites: Sites of the job.
        noise_shares: Sites whose noise was in each sum that the attacker saw; None
            where it saw each update, and noise is in each.
        rounds: Rounds of each of the two runs.
        seconds: How long the audit took.
        sites: One entry for each audited site.
    """

    job_name: str
    unit: str
    num_sites: int
    noise_shares: int | None
    rounds: int
    seconds: float
    sites: Sequence[SiteFindings]

    @property
    def broken(self) -> Sequence[SiteFindings]:
        """Sites whose promise was broken."""
        return [site for site in self.sites if site.is_broken]

    @property
    def inconclusive(self) -> Sequence[SiteFindings]:
        """Sites whose promise was not tested."""
        return [site for site in self.sites if site.is_inconclusive]


def document(findings: AuditFindings) -> dict[str, Any]:
    """The content of ``audit.json``; an infinite epsilon is null."""
    return {
        "job": findings.job_name,
        "unit": findings.unit,
        "num_sites": findings.num_sites,
        "noise_shares": findings.noise_shares,
        "rounds": findings.rounds,
        "seconds": round(findings.seconds, 3),
        "broken": [site.site for site in findings.broken],
        "inconclusive": [site.site for site in findings.inconclusive],
        "sites": [_site_document(site) for site in findings.sites],
    }


def _site_document(site: SiteFindings) -> dict[str, Any]:
    promise, guesses = site.promise, site.guesses
    return {
        "site": site.site,
        "epsilon": promise.epsilon if promise.is_private else None,
        "delta": promise.delta,
        "terms": promise.terms,
        "verdict": site.verdict.name.lower(),
        "confidence": site.confidence,
        "lower_bound": site.bound,
        "largest_lower_bound": site.largest_bound,
        "lower_bound_if_independent": site.independent_bound,
        "p_value": site.p_value,
        "p_value_without_noise": site.p_value_without_noise,
        "trade_off": None if site.curve is None else _curve_document(site.curve),
        "canaries": guesses.canaries,
        "canaries_in": int(site.is_in_m.sum()),
        "guesses": guesses.guesses,
        "correct": guesses.correct,
        "canary_auc": site.canaries.auc,
        "membership_final_model": _roc_document(site.membership.final),
        "membership_local_model": (
            None
            if site.membership.local is None
            else _roc_document(site.membership.local)
        ),
    }


def _curve_document(curve: CurveFindings) -> dict[str, Any]:
    return {
        "guesses": curve.guesses.guesses,
        "correct": curve.guesses.correct,
        "p_value_one_run": curve.p_values.one_run,
        "p_value_independent": curve.p_values.independent,
        "p_value_repeated_noise": curve.repeated_noise,
        "p_value_sampling": curve.sampling,
        "p_value_one_run_without_noise": curve.without_noise.one_run,
        "p_value_independent_without_noise": curve.without_noise.independent,
    }


def _roc_document(roc: Roc) -> dict[str, Any]:
    found: dict[str, Any] = {
        "members": roc.num_in,
        "non_members": roc.num_out,
        "auc": roc.auc,
        "auc_standard_error": roc.auc_error,
    }
    for rate in FALSE_POSITIVES:
        value, low, high = roc.true_positives_at(rate)
        found[f"tpr_at_fpr_{rate:g}"] = {"value": value, "low": low, "high": high}
    return found


def lines(findings: AuditFindings) -> Iterator[str]:
    """Describe the findings, site by site."""
    for number, site in enumerate(findings.sites):
        if number:
            yield ""
        yield from _site_lines(site)


def _site_lines(site: SiteFindings) -> Iterator[str]:
    promise, guesses = site.promise, site.guesses
    delta = format_delta(promise.delta)
    yield f"site         {site.site}"
    if promise.is_private:
        yield f"epsilon      {format_epsilon(promise.epsilon)} at delta {delta}"
        yield f"             {promise.terms}"
    else:
        yield "epsilon      infinite: the job has no differential privacy"
    yield (
        f"lower bound  {site.bound:.2f} at delta {delta}, confidence "
        f"{site.confidence:.0%}; at most {site.largest_bound:.2f} could show"
    )
    yield (
        f"canaries     {guesses.canaries}, {guesses.guesses} guesses, "
        f"{guesses.correct} correct"
    )
    if site.curve is not None:
        found, told = site.curve.p_values, site.curve.guesses
        yield (
            f"trade-off    p-value {format_p(found.independent)} if canaries are "
            f"independent; {format_p(found.one_run)} in any case, "
            f"{told.guesses} guesses, {told.correct} correct"
        )
        yield (
            f"steps        p-value {format_p(site.curve.repeated_noise)} if each round "
            f"draws new noise; {format_p(site.curve.sampling)} if each step draws "
            "records independently"
        )
    yield f"membership   {roc_line(site.membership.final)}"
    yield f"promise      {_verdict_line(site)}"


def _verdict_line(site: SiteFindings) -> str:
    found = format_p(site.p_value)
    why = {
        Verdict.BROKEN: f": the p-value of all tests is {found}",
        Verdict.INCONCLUSIVE: ": this audit would not notice missing noise",
        Verdict.NOT_BROKEN: f": the p-value of all tests is {found}",
    }
    return f"{site.verdict}{why.get(site.verdict, '')}"


def format_p(value: float) -> str:
    """Write a p-value with two digits."""
    return f"{value:.2g}"


def roc_line(roc: Roc) -> str:
    """Area and rates of membership inference in one line."""
    rates = ", ".join(
        f"{roc.true_positives_at(rate)[0]:.1%} of members found with "
        f"{int(rate * roc.num_out)} of {roc.num_out} others"
        for rate in FALSE_POSITIVES
    )
    return f"AUC {roc.auc:.3f} +-{roc.auc_error:.3f}; {rates}"
