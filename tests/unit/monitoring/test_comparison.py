"""Runs side by side: every number said, nothing compared that cannot be."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.event_samples import Script, run

from federation.events import Event
from federation.messages import FailureKind
from monitoring.pages.comparison import (
    ComparedRun,
    changed_keys,
    draw_comparison,
    has_accuracy,
    render,
)
from monitoring.pages.report import write_page
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


def test_every_run_has_a_line(page: str):
    """Job, rounds, loss, accuracy, epsilon of its cap, bytes, time."""
    text = _text(page, "runs")
    quality = "2 of 2 ~1.258 ± 0.087 ~52.5 % ± 1.6"
    assert f"two-clouds-private eps1 completed {quality} 0.99 of 1" in text
    assert f"two-clouds-private eps8 completed {quality} 7.92 of 8" in text
    assert "two-clouds-quickstart completed 2 of 2 1.258 52.5 % none -" in text


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


def test_figures_are_there_and_self_contained(page: str):
    """Privacy against utility, and the curves of all runs over each other."""
    for name in ("privacy-utility", "loss", "accuracy"):
        assert f'id="figure-{name}"' in page
    assert "<script" not in page
    assert not re.findall(r"https?://(?!www\.w3\.org/)", page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_sites_are_counted_and_come_last():
    """The tenth is not put before the second."""
    jobs = [
        f"zeal = {at}\n" + "".join(f'[[sites]]\nname = "{at}{n}"\n' for n in range(11))
        for at in "12"
    ]
    found = list(changed_keys(jobs))
    assert found[0] == "zeal"
    assert found[-2:] == ["sites.9.name", "sites.10.name"]


def test_settings_that_differ_are_named(page: str):
    """Those alone, with a dash where a job does not have them."""
    text = _text(page, "settings")
    assert "privacy.differential_privacy.target_epsilon 1.0 8.0 -" in text
    assert "rounds" not in text


def test_runs_without_privacy_have_no_such_figure():
    """Nor a column: there is no epsilon to show."""
    runs = [_run(event_samples.two_sites(n), f"runs/{n}") for n in (1, 2)]
    found = render(runs)
    assert 'id="figure-privacy-utility"' not in found
    assert "psilon" not in found
    assert not re.findall(r"<t[hd]", found.split('id="settings"')[1].split("</sec")[0])


def test_what_cannot_be_compared_is_said():
    """Other data, tasks, deltas or meanings of epsilon, and runs that continue."""
    three = _run(event_samples.secure(1))
    language = _run(event_samples.language(1)[:-1])
    private = _private(1.0)
    planned = replace(private.view.privacy, unit="site")
    spent = {
        site: replace(told, delta=1e-6) for site, told in private.view.spent.items()
    }
    other = replace(
        private, view=replace(private.view, privacy=planned, spent=spent), folder="b"
    )
    text = render([three, language, private, other])
    for key in ("records", "tasks", "meaning", "deltas", "running"):
        assert f'id="caution-{key}"' in text
    assert 'class="message"' not in render([private, _private(8.0)])


def test_mixed_tasks_are_held_against_each_other_by_loss():
    """Accuracy over tokens says little."""
    views = {"a": _run(event_samples.language(1)).view, "b": _private(1.0).view}
    assert not has_accuracy(views)
    assert "loss in nats" in draw_comparison(views)["privacy-utility"]


def test_runs_without_results_can_be_compared():
    """Before the first evaluation there is a table and no figure."""
    begun = _run(event_samples.private(1)[:4])
    failed = _run(
        run(Script(rounds=1, failures=((1, "gcp-us-central1", FailureKind.CRASHED),)))
    )
    assert draw_comparison({"a": begun.view}) == {}
    assert "- of 8" in render([begun, failed])


def test_bars_of_noise_end_where_accuracies_do():
    """However large the noise is, the axis does not go beyond 100 %."""
    private = _private(1.0)
    (one, other) = private.view.privacy.sites
    sites = (replace(one, held_out_noise=90.0), other)
    view = replace(private.view, privacy=replace(private.view.privacy, sites=sites))
    drawn = draw_comparison({"a": view})["privacy-utility"]
    labels = [float(text) for text in re.findall(r">(\d+)</text>", drawn)]
    assert 100 in labels
    assert max(labels) == 100


@pytest.mark.slow
def test_many_runs_are_told_apart_and_reproducible():
    """Runs beyond the colours have other dashes; the same runs give the same bytes."""
    runs = [_private(float(cap), seed=cap) for cap in range(1, 11)]
    page = render(runs)
    assert page == render(runs)
    assert page.count("stroke-dasharray") > 2


def test_twenty_runs_stay_readable():
    """Numbers tie table, curves and settings together; the table can be sorted."""
    runs = [
        _run(
            run(Script(rounds=2, job_name=f"lr-{n}", seed=n)), f"runs/{n}", f"lr = {n}"
        )
        for n in range(20)
    ]
    page = render(runs)
    losses = [one.view.rounds[-1].loss for one in runs]
    for number, loss in enumerate(losses, 1):
        assert f"--number:{number - 1};--loss:{sorted(losses).index(loss)};" in page
        assert f"</i>{number}</th>" in page
        assert f">{number} lr-{number - 1} " in page
    assert "#order-loss:checked ~ .scroll tbody tr { order: var(--loss); }" in page
    assert 'id="order-epsilon"' not in page
    keys = re.findall(r'<i class="dashes(\d)" style="background:([^"]*)"', page)
    assert len(set(keys)) == 20


def test_names_and_jobs_are_text():
    """Whatever a job or a folder is called."""
    events = run(Script(rounds=1, job_name=HOSTILE))
    job = f'name = "{HOSTILE}"\n'
    text = render([_run(events, HOSTILE, job), _run(events, HOSTILE)])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 2
    assert "(2)" in text


def test_changed_keys():
    """Tables and lists of tables by whole keys; where a run is kept is no setting."""
    jobs = (
        'seed = 1\n[storage]\nurl = "a"\n[[sites]]\nname = "x"\n[[sites]]\nname = "y"',
        'seed = 1\n[storage]\nurl = "b"\n[[sites]]\nname = "x"\n[[sites]]\nname = "z"',
    )
    assert changed_keys(jobs) == {"sites.1.name": ["y", "z"]}
    assert changed_keys(["= broken", "rounds = 1"]) == {"rounds": ["-", "1"]}
    assert changed_keys(["a = true", "a = false"]) == {"a": ["true", "false"]}


def test_page_is_written_whole(tmp_path: Path):
    """An older page is replaced and nothing else is left."""
    path = tmp_path / "comparison.html"
    path.write_text("old")
    write_page(render([_private(1.0), _private(2.0)]), path)
    assert path.read_text(encoding="utf-8").endswith("</html>")
    assert list(tmp_path.iterdir()) == [path]
