"""What an audit says: lines, JSON, page and figures."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from federation.errors import StoreUnavailable
from monitoring.audit_findings import (
    AuditFindings,
    CurveFindings,
    Membership,
    Promise,
    SiteFindings,
    Verdict,
    document,
    lines,
)
from monitoring.pages.audit_page import render, write_audit
from privacy.dp import curve_tests
from privacy.dp.auditing import Guesses, guess, roc
from privacy.dp.curve_tests import PValues
from privacy.dp.trade_off import EPSILONS, TradeOff

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(4)
TERMS = "unit record, neighbours: add or remove one record"


def site(
    name: str = "left",
    *,
    epsilon: float = 8.0,
    shift: float = 2.0,
    num: int = 1000,
    curve: CurveFindings | None = None,
    num_audited: int = 1,
) -> SiteFindings:
    """Findings of normal scores, so far apart."""
    is_in = RNG.random(num) < 0.5
    scores = RNG.normal(size=num) + shift * is_in
    attack = roc(RNG.normal(size=90), RNG.normal(size=40))
    return SiteFindings(
        num_audited=num_audited,
        site=name,
        promise=Promise(epsilon=epsilon, delta=1e-5, terms=TERMS),
        guesses=guess(scores, is_in, num_guesses=min(100, num // 10)),
        curve=curve,
        confidence=0.95,
        scores_m=scores,
        is_in_m=is_in,
        canaries=roc(scores[is_in], scores[~is_in]),
        independent_bound=1.25,
        membership=Membership(final=attack, local=attack),
    )


def findings(*sites: SiteFindings) -> AuditFindings:
    return AuditFindings(
        job_name="<b>job</b>",
        unit="record",
        num_sites=4,
        noise_shares=None,
        rounds=3,
        seconds=12.5,
        sites=sites,
    )


def with_p_values(
    independent: float,
    one_run: float,
    *,
    least: float = 1e-9,
    steps: tuple[float, float] = (1.0, 1.0),
) -> CurveFindings:
    """Tests of a curve with these p-values."""
    return CurveFindings(
        guesses=Guesses(canaries=1000, guesses=300, correct=290, low=-1.0, high=1.0),
        p_values=PValues(one_run=one_run, independent=independent),
        without_noise=PValues(one_run=least, independent=least),
        repeated_noise=steps[0],
        sampling=steps[1],
    )


KEPT = site(epsilon=2.5, shift=1.0, curve=with_p_values(1.0, 1.0))
FREE = site("right", epsilon=float("inf"))
DEAF = site("deaf", epsilon=8.0, shift=40.0)
BROKEN = site("<i>bad</i>", epsilon=0.5, shift=4.0)


def test_bound_beyond_epsilon_is_broken():
    """An infinite epsilon cannot be."""
    assert findings(KEPT, BROKEN, FREE).broken == [BROKEN]
    assert 0 < KEPT.bound <= KEPT.promise.epsilon < KEPT.largest_bound


def test_epsilon_out_of_reach_of_every_guess_is_inconclusive():
    """Every guess is right, as without noise, and epsilon is still larger."""
    assert DEAF.guesses.correct == DEAF.guesses.guesses
    assert DEAF.bound == DEAF.largest_bound < DEAF.promise.epsilon
    assert DEAF.verdict is Verdict.INCONCLUSIVE
    found = findings(KEPT, BROKEN, DEAF, FREE)
    assert (found.broken, found.inconclusive) == ([BROKEN], [DEAF])
    told = document(found)
    assert told["inconclusive"] == ["deaf"]
    assert [told_of["verdict"] for told_of in told["sites"]] == [
        "not_broken",
        "broken",
        "inconclusive",
        "none",
    ]
    assert "inconclusive: " in "\n".join(lines(findings(DEAF)))


@pytest.mark.parametrize(
    ("independent", "one_run", "steps", "verdict"),
    [
        (0.016, 1.0, (1.0, 1.0), Verdict.BROKEN),
        (1.0, 0.016, (1.0, 1.0), Verdict.BROKEN),
        (1.0, 1.0, (2e-4, 1.0), Verdict.BROKEN),
        (1.0, 1.0, (1.0, 2e-4), Verdict.BROKEN),
        (0.017, 0.017, (3e-4, 3e-4), Verdict.NOT_BROKEN),
        (1.0, 1.0, (1.0, 1.0), Verdict.NOT_BROKEN),
    ],
)
def test_five_tests_share_the_risk_of_a_false_alarm(
    independent: float, one_run: float, steps: tuple[float, float], verdict: Verdict
):
    """Each has a part of it; so little is certain at a confidence of 95 %."""
    found = site(curve=with_p_values(independent, one_run, steps=steps))
    assert found.verdict is verdict
    parts = min(independent, one_run) / 0.33, min(steps) / 0.005
    assert found.p_value == min(1.0, *parts)
    both = replace(found, num_audited=2)
    assert both.p_value == min(1.0, 2 * min(parts))
    told = document(findings(found))["sites"][0]
    assert told["p_value"] == found.p_value
    assert told["trade_off"]["p_value_one_run"] == one_run
    assert told["trade_off"]["p_value_independent"] == independent
    text = "\n".join(lines(findings(found)))
    assert f"trade-off    p-value {independent:.2g} if canaries are" in text
    assert f"{found.p_value:.2g}" in render(findings(found))


def test_tests_that_could_not_contradict_are_inconclusive():
    """A curve that allows everything, beside a bound that cannot reach epsilon."""
    found = site(shift=40.0, curve=with_p_values(1.0, 1.0, least=0.017))
    assert found.verdict is Verdict.INCONCLUSIVE
    all_allowed = TradeOff(np.ones_like(EPSILONS))
    assert curve_tests.independent(all_allowed, found.scores_m, found.is_in_m) == 1.0


@pytest.mark.parametrize("num_canaries", [100, 1000, 20_000])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0, 5.0, 8.0, 20.0])
def test_training_without_noise_is_never_called_not_broken(
    num_canaries: int, epsilon: float
):
    """Whatever the epsilon, and however few the canaries."""
    found = site(epsilon=epsilon, shift=1e6, num=num_canaries)
    assert found.verdict in {Verdict.BROKEN, Verdict.INCONCLUSIVE}


def test_lines_say_what_was_promised_and_what_was_proved():
    """Epsilon never without delta, and its terms beside it."""
    text = "\n".join(lines(findings(KEPT, BROKEN, FREE)))
    assert f"epsilon      2.50 at delta 1e-05\n             {TERMS}" in text
    assert f"lower bound  {KEPT.bound:.2f} at delta 1e-05, confidence 95%" in text
    assert f"canaries     1000, 100 guesses, {KEPT.guesses.correct} correct" in text
    assert text.count("not broken: the p-value of all tests is") == 1
    assert text.count("BROKEN: the p-value of all tests is") == 1
    assert "infinite: the job has no" in text


def test_page_shows_every_site_and_escapes_names():
    """Two figures each, a verdict, and nothing from the network."""
    page = render(findings(BROKEN, FREE))
    assert page.count('<svg class="plot"') == 4
    assert "does not hold" in page
    assert "<b>job</b>" not in page
    assert "<i>bad</i>" not in page
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    numbers = re.findall(r'\bid="([^"]+)"', page)
    assert len(numbers) == len(set(numbers))


def test_page_without_a_broken_promise_does_not_promise_safety():
    """Nor does it speak of epsilons that were never promised."""
    assert "proves nothing about attacks" in render(findings(KEPT))
    deaf = render(findings(KEPT, DEAF))
    assert "proves nothing about attacks" not in deaf
    assert "this audit is inconclusive" in deaf
    free = render(findings(FREE))
    assert "has no differential privacy" in free
    assert "most that epsilon allows" not in free


def test_page_of_sums_says_whose_noise_they_hold():
    """And nothing of models that nobody sees."""
    unseen = replace(KEPT, membership=replace(KEPT.membership, local=None))
    found = replace(findings(unseen), unit="joint", noise_shares=3)
    page = render(found)
    assert "noise of 3 of 4 sites" in page
    assert "far the opened sums" in page
    assert "own last model" not in page
    assert "own model" not in page
    assert document(found)["sites"][0]["membership_local_model"] is None
    assert "own last model" in render(findings(KEPT))


def test_page_that_cannot_be_written_is_an_error(tmp_path: Path):
    """With the path in it."""
    with pytest.raises(StoreUnavailable, match="nowhere"):
        write_audit(findings(KEPT), tmp_path / "nowhere" / "audit.html")
