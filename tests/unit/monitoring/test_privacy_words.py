"""An epsilon is never said without what it means, and never too small."""

import math
import random
import statistics
from dataclasses import replace

import pytest
from support import event_samples

from federation.events import Event, ModelEvaluated, PrivacyPlanned
from federation.messages import MetricSums, PrivacySpent
from monitoring import privacy_words
from monitoring.views.run_fold import fold
from privacy.dp.held_out import HeldOutMechanism


def _planned(**changes: object) -> PrivacyPlanned:
    plan = fold(event_samples.private(1)).privacy
    return replace(plan, **changes)


def test_spent_has_every_term():
    """Cap, delta, relation, accountant, sampling, and the held-out records'."""
    total = PrivacySpent(epsilon=7.921, delta=1e-4, held_out_epsilon=7.9)
    assert privacy_words.spent(_planned(), total) == (
        "7.93 of 8 at delta 1e-04 (one record added or removed; PLD; Poisson "
        "sampling), held-out 7.90"
    )
    public = replace(total, held_out_epsilon=None)
    assert privacy_words.spent(_planned(), public).endswith("Poisson sampling)")
    one, other = _planned().sites
    differing = _planned(sites=(one, replace(other, delta=2e-5)))
    assert privacy_words.spent(differing, total).startswith("at most 7.93 of 8 at")


def test_nothing_told_is_not_nothing_spent():
    """A run that ended before any answer promises no zero."""
    assert privacy_words.spent(_planned(), None).startswith(
        "not reported by any site ("
    )


def test_unknown_terms_are_said_as_they_are():
    """Another relation, accountant or unit needs no change here."""
    planned = _planned(relation="replace one site", accountant="rdp", sampling="none")
    assert privacy_words.terms(planned) == "replace one site; RDP; none"
    site = _planned(unit="site")
    assert privacy_words.promise(site).startswith("unit site: ")


def _lines(events: list[Event]) -> list[str]:
    planned = fold(events).privacy
    assert planned is not None
    return list(privacy_words.lines(planned, max_sites=8))


def test_joint_noise_is_said_to_be_in_the_sum():
    """One record is hidden, from whom, and by whose noise."""
    promise, against, *sites = _lines(event_samples.joint(1))
    assert promise == (
        "unit joint: epsilon at most 8 at delta 1e-04 for the records of each site (one"
        " record added or removed; PLD; Poisson sampling: each record is in each step "
        "independently)"
    )
    assert against == f"holds against {event_samples.HOLDS_AGAINST['joint']}"
    assert sites[0] == (
        "aws-us-east-1  noise multiplier 0.900 in the sum  sampling rate 0.05  "
        "1 step a round  held-out counts +-3.2"
    )
    joint = fold(event_samples.joint(1))
    told = privacy_words.meaning(joint.privacy, joint.total_spent)
    assert "from the sums of the sites' updates" in told
    assert "with any one training record of a site left out" in told
    assert "At each site, epsilon is at most 7.92 of 8 at delta" in told


@pytest.mark.parametrize("num_sites", [4, 16])
def test_whole_sites_are_no_records(num_sites: int):
    """No sampling, no steps, one epsilon for all, and how much noise that takes."""
    events = event_samples.whole_sites(1, num_sites)
    promise, _, means, signal, *_ = _lines(events)
    assert promise == (
        "unit site: epsilon at most 8 at delta 1e-04 for each site (one site's data "
        "present or absent; PLD; no sampling: every site is in every round)"
    )
    assert means == f"{num_sites} sites  noise multiplier 0.900 in the sum"
    assert signal.startswith("signal-to-noise ratio 1.4: the largest mean update")
    view = fold(events)
    told = privacy_words.meaning(view.privacy, view.total_spent)
    assert "with all that any one site holds left out" in told
    assert "For every site, epsilon is at most 7.92 of 8" in told


def test_drowned_updates_are_called_so():
    """A job that insists on them is run, and told."""
    planned = fold(event_samples.whole_sites(1)).privacy
    assert privacy_words.signal(_planned()) is None
    low = replace(planned, signal_to_noise=0.31)
    assert privacy_words.signal(low).endswith("; mostly noise")
    assert "mostly noise" not in privacy_words.signal(planned)


def test_promise_without_sites_has_no_bound():
    """There is nobody who would keep one."""
    assert "no bound" in privacy_words.promise(_planned(sites=()))
    assert privacy_words.epsilon_of_cap(1.0, _planned(sites=())) == "1.00"


def _evaluated(count: int, correct: int, sites: tuple[str, ...]) -> ModelEvaluated:
    return ModelEvaluated(
        at=0.0,
        round_index=1,
        pooled=MetricSums(count=count, loss_sum=0.0, metrics={"correct": correct}),
        sites=sites,
        by_site=(),
        bytes_down=(),
        bytes_up=(),
    )


def test_noise_of_an_accuracy():
    """Sites' noises add up in squares; that of the count has its part."""
    both = _evaluated(320, 320, event_samples.TWO_SITES)
    expected = math.sqrt(2) * event_samples.HELD_OUT_NOISE * math.sqrt(2) / 320
    assert privacy_words.accuracy_noise(_planned(), both) == pytest.approx(expected)
    one = _evaluated(160, 0, event_samples.TWO_SITES[:1])
    expected = event_samples.HELD_OUT_NOISE / 160
    assert privacy_words.accuracy_noise(_planned(), one) == pytest.approx(expected)


def test_noise_of_a_loss():
    """A prediction adds six times as much to it as to the right ones."""
    event = _evaluated(320, 0, event_samples.TWO_SITES)
    expected = math.sqrt(2) * event_samples.HELD_OUT_NOISE * 6 / 320
    assert privacy_words.loss_noise(_planned(), event) == pytest.approx(expected)
    assert privacy_words.plus_minus(expected) == " +-0.085"
    assert privacy_words.loss_noise(None, event) is None
    assert privacy_words.plus_minus(None) == ""


@pytest.mark.parametrize("size", [200, 2000])
def test_noise_is_that_of_the_mechanism(size: int):
    """To first order: what is said is what many releases show."""
    mechanism = HeldOutMechanism(noise_multiplier=3.0, predictions=1, num_records=size)
    exact = MetricSums(count=size, loss_sum=1.5 * size, metrics={"correct": size // 2})
    keys = random.Random(5)  # noqa: S311
    found = [mechanism.release(exact, keys.randbytes) for _ in range(300)]
    planned = _planned()
    (site, _) = planned.sites
    promise = replace(site, held_out_noise=mechanism.standard_deviation())
    event = replace(_evaluated(1, 0, (site.site,)), pooled=exact)
    planned = replace(planned, sites=(promise,))
    for said, values in (
        (privacy_words.accuracy_noise(planned, event), [s.accuracy for s in found]),
        (privacy_words.loss_noise(planned, event), [s.loss for s in found]),
    ):
        assert said == pytest.approx(statistics.stdev(values), rel=0.1)
