"""Runs side by side: every number said, nothing compared that cannot be."""

import re
from typing import Any

import pytest
from support import event_samples
from support.event_samples import Script, run

from federation.events import Event
from monitoring.pages.comparison import (
    ComparedRun,
    render,
)
from monitoring.views.run_fold import fold

pytestmark = pytest.mark.slow

JOB = 'name = "x"\nrounds = 2\n[privacy.differential_privacy]\ntarget_epsilon = {}\n'
HOSTILE = "</svg><script>alert('x')</script>&"


def _run(events: list[Event], folder: str = "runs/a", job: str = "") -> ComparedRun:
    return ComparedRun(folder=folder, view=fold(events), job_toml=job)


def _private(cap: float, **changes: Any) -> ComparedRun:
    events = event_samples.private(2, epsilon_cap=cap, **changes)
    return _run(events, f"runs/eps{cap:g}", JOB.format(cap))


@pytest.fixture(scope="module")
def page() -> str:
    """Two budgets, and a run without differential privacy."""
    plain = _run(event_samples.two_sites(2), "runs/plain", 'name = "x"\nrounds = 2\n')
    return render([_private(1.0), _private(8.0), plain])


def _text(page: str, section: str) -> str:
    _, _, rest = page.partition(f'<section id="{section}"')
    part, _, _ = rest.partition("</section>")
    return " ".join(re.sub(r"<[^>]*>", " ", part.partition(">")[2]).split())


def test_epsilons_have_their_terms(page: str):
    """And a run that has none is not said to have a small one."""
    text = _text(page, "privacy")
    terms = "record; one record added or removed; PLD; Poisson sampling"
    assert text.count(terms) == 2
    assert "two-clouds-quickstart none no differential privacy" in text


def test_units_are_not_held_to_be_the_same():
    """The page says whose data each epsilon is about, and that they differ."""
    runs = [_run(event_samples.joint(2), "a"), _run(event_samples.whole_sites(2), "b")]
    page = render(runs)
    text = _text(page, "privacy")
    against = event_samples.HOLDS_AGAINST["site"]
    assert (
        "site; one site&#39;s data present or absent; PLD; no sampling; against "
        + against
    ) in text
    assert "joint; one record added or removed; PLD; Poisson sampling" in text
    assert "in: unit, neighbours, sampling." in page


def test_same_record_against_others_is_another_promise():
    """Joint noise hides what a site's own noise does, from fewer."""
    own = _run(event_samples.private_and_secure(2), "a")
    page = render([own, _run(event_samples.joint(2), "b")])
    assert "in: unit, adversary." in page


def test_settings_that_differ_are_named(page: str):
    """Those alone, with a dash where a job does not have them."""
    text = _text(page, "settings")
    assert "privacy.differential_privacy.target_epsilon 1.0 8.0 -" in text
    assert "rounds" not in text


@pytest.mark.slow
def test_many_runs_are_told_apart_and_reproducible():
    """Runs beyond the colours have other dashes; the same runs give the same bytes."""
    runs = [_private(float(cap), seed=cap) for cap in range(1, 11)]
    page = render(runs)
    assert page == render(runs)
    assert page.count("stroke-dasharray") > 2


def test_names_and_jobs_are_text():
    """Whatever a job or a folder is called."""
    events = run(Script(rounds=1, job_name=HOSTILE))
    job = f'name = "{HOSTILE}"\n'
    text = render([_run(events, HOSTILE, job), _run(events, HOSTILE)])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 2
    assert "(2)" in text
