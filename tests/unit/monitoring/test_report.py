"""The report stands alone, says everything, and trusts no text."""

import html
import io
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import pytest
import tomli_w
from support import event_samples
from support.event_samples import Script, run
from support.stored_runs import stored

from federation.errors import StoreUnavailable
from federation.events import (
    ModelEvaluated,
    RunStarted,
    SiteAnswered,
    SiteFailed,
)
from federation.messages import (
    UNKNOWN_ENERGY,
    Energy,
    FailureKind,
    MetricSums,
    Phase,
    PrivacySpent,
    Resources,
)
from monitoring.pages import panels
from monitoring.pages.figures import MAX_READOUTS
from monitoring.pages.plots import (
    draw_all,
    site_colours,
)
from monitoring.pages.report import FAILURE_MEANINGS, render, write_report
from monitoring.terminal.progress import PlainProgress
from monitoring.views.result_json import result
from monitoring.views.round_view import metrics_of
from monitoring.views.run_fold import fold
from monitoring.views.run_view import MAX_SITES_SHOWN, RunView
from monitoring.views.site_view import total

# One worker draws each page once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("report")]

JOB = 'name = "two-clouds-quickstart"\nrounds = 10\n'
VERSIONS = {"crossfed": "0.1.0", "torch": "2.8.0"}
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
HOSTILE = "</pre></svg><script>alert('x')</script>&$\\frac{1}{0}$\x1b"
SECTIONS = {
    "summary",
    "figures",
    "sites",
    "rounds",
    "failures",
    "warnings",
    "reading",
    "protection",
    "configuration",
    "versions",
}
RUNS = {
    "quiet": event_samples.two_sites(3),
    "troubled": event_samples.troubled(),
    "resumed": event_samples.resumed(),
    "language": event_samples.language(3),
    "secure": event_samples.secure(),
    "private": event_samples.private(3),
    "private and secure": event_samples.private_and_secure(),
    "joint": event_samples.joint(),
    "whole sites": event_samples.whole_sites(),
    "exhausted": event_samples.exhausted(),
    "stored": stored(),
    "private, in progress": event_samples.private(3)[:4],
    "only started": event_samples.two_sites(1)[:1],
    "in progress": event_samples.troubled()[:30],
}
# One of each kind, whose pages have all of their figures.
DRAWN = {"quiet", "troubled", "language", "private", "secure", "whole sites"}


class _Reader(HTMLParser):
    """Checks that tags close in order; collects identifiers, tags and links."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.tags, self.links = [], [], set(), []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [v for n, v in attrs if n in {"href", "src", "xlink:href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


@cache
def page_of(name: str) -> str:
    """Page of one of the runs above, most of them without figures: they take long."""
    figures = None if name in DRAWN else ()
    return render(fold(RUNS[name]), JOB, VERSIONS, figures=figures)


def page_with(view: RunView, *names: str) -> str:
    """A page with some figures alone, as none takes milliseconds."""
    figures = panels.of_run(view, names) if names else ()
    return render(view, JOB, VERSIONS, figures=figures)


@pytest.mark.parametrize("name", RUNS)
def test_page_is_whole_and_self_contained(name: str):
    """Tags match, names are unique, and nothing points outside the file."""
    page = page_of(name)
    reader = _read(page)
    assert page.startswith("<!DOCTYPE html>")
    assert set(reader.ids) >= SECTIONS
    assert len(reader.ids) == len(set(reader.ids))
    assert not {"script", "link", "img", "iframe", "object"} & reader.tags
    assert set(re.findall(r"https?://[^\s\"'<)]*", page)) <= NAMESPACES
    assert all(link.startswith("#") for link in reader.links)
    assert {link[1:] for link in reader.links} <= set(reader.ids)


def test_confusion_matrix_has_names_counts_and_shares():
    """Names are text; a class without examples has no recall."""
    events = event_samples.secure(1)
    names = ("cat", HOSTILE, "none")
    counts = [[6, 2, 0], [1, 1, 0], [0, 0, 0]]
    cells = {
        f"confusion_{label}_{found}": number
        for label, row in enumerate(counts)
        for found, number in enumerate(row)
    }
    sums = MetricSums(count=10, loss_sum=2.0, metrics={"correct": 7, **cells})
    view = fold(
        replace(event, classes=names)
        if isinstance(event, RunStarted)
        else replace(event, pooled=sums)
        if isinstance(event, ModelEvaluated)
        else event
        for event in events
    )
    assert view.confusion == counts
    assert result(view)["final"]["confusion"] == counts
    page = page_with(view)
    section = page[page.index('id="confusion"') : page.index('id="sites"')]
    _read(page)
    assert "script" not in _read(page).tags
    assert "cat predicted as cat: 75 %" in section
    assert ">75.0 %</td>" in section  # recall of cat
    assert ">85.7 %</td>" in section  # precision of cat
    assert section.count(">-</td>") == 2  # of a class that nobody has or predicts


def test_confusion_matrix_with_noise_has_shares_of_0_to_1():
    """Counts may be negative, and more than their row or column."""
    counts = [[590, -3, 11], [-7, 4, 0], [2, -9, 5]]
    events = event_samples.private(1)
    cells = {f"confusion_{i}_{j}": counts[i][j] for i in range(3) for j in range(3)}
    sums = MetricSums(count=600, loss_sum=2.0, metrics={"correct": 590, **cells})
    view = fold(
        replace(event, classes=("a", "b", "c"))
        if isinstance(event, RunStarted)
        else replace(event, pooled=sums)
        if isinstance(event, ModelEvaluated)
        else event
        for event in events
    )
    page = page_with(view)
    section = page[page.index('id="confusion"') : page.index('id="sites"')]
    assert ">-7</td>" in section
    assert "c predicted as a: 0 %" in section
    assert section.count(">-</td>") == 3  # recall of b and c, and precision of b
    assert ">100.0 %</td>" in section  # precision of a, 590 / 585
    assert "noise on a count has a standard deviation of" in section
    found = metrics_of(sums)
    assert 0 < found["mean_iou"] < found["macro_f1"] < 1


def test_report_does_not_claim_answers_that_were_not_needed():
    events = event_samples.two_sites(2)
    claim = "every site sent its update"
    assert claim in _section(page_with(fold(events)), "failures")
    (one, *_) = [event for event in events if isinstance(event, SiteAnswered)]
    left = SiteFailed(
        at=one.at,
        round_index=one.round_index,
        site=one.site,
        kind=FailureKind.SURPLUS,
        message="others had answered already",
        asked_seconds=one.asked_seconds,
        answered_seconds=one.answered_seconds,
        bytes_down=one.bytes_down,
        bytes_up=0,
    )
    told = [left if event is one else event for event in events]
    section = _section(page_with(fold(told)), "failures")
    assert claim not in section
    assert "not needed" in section


def test_run_in_virtual_time_names_no_date():
    """It counts from 0, which would be a day of 1970."""
    events = event_samples.two_sites(1)
    for engine, is_dated in (("inproc", True), ("virtual", False)):
        changed = [
            replace(event, engine=engine) if isinstance(event, RunStarted) else event
            for event in events
        ]
        page = page_with(fold(changed))
        assert ("<b>started</b>" in page) is is_dated


def test_secure_run_shows_sums_only():
    """The header says so; the key of the curves names no site, the tables do."""
    view, page = fold(RUNS["secure"]), page_of("secure")
    assert ">secure aggregation</span>" in page
    assert "Thin lines far apart" not in page
    key = page.split('<div class="key">')[1].split("</div>")[0]
    assert re.findall(r"</i>([^<]*)", key) == ["all sites", "training"]
    assert all(f"{row.training_loss:.3f}" in page for row in view.rounds)


def test_plain_run_does_not_claim_secrecy():
    """Each site has its line, and nothing of secure steps is on the page."""
    page = page_of("quiet")
    key = page.split('<div class="key">')[1].split("</div>")[0]
    names = ["all sites", "training", *event_samples.TWO_SITES]
    assert re.findall(r"</i>([^<]*)", key) == names
    assert ">secure aggregation</span>" not in page
    assert "Thin lines far apart" in page


def _section(page: str, name: str) -> str:
    """Text of a section, in one line."""
    _, _, rest = page.partition(f'<section id="{name}"')
    part, _, _ = rest.partition("</section>")
    return " ".join(re.sub(r"<[^>]*>", " ", part.partition(">")[2]).split())


def test_private_run_says_what_is_promised_and_what_is_not():
    """Epsilon with its terms, each site's means, what is noised and what is open."""
    page = page_of("private")
    text = _section(page, "privacy")
    for words in (
        "any one training record of a site",
        "epsilon is at most 7.92 of 8 at delta 1e-04 (one record added or removed;",
        "Neighbours: add or remove one record",
        "Assumption: Poisson sampling: each record is in each step independently",
        "gcp-us-central1 7.76 8 1e-04 0.950 0.05 20",
        "Training losses never leave a site.",
        "Held-out records have their own budget",
        "bn1: BatchNorm2d by GroupNorm",
        "What is not protected",
    ):
        assert words in text
    assert 'id="figure-epsilon"' in page
    assert "No differential privacy in this run" not in page


def test_private_tiles_and_tables():
    """A bare epsilon is nowhere; what carries noise is marked, with its size."""
    page = page_of("private")
    tiles = _section(page, "summary")
    assert (
        "Epsilon 7.92 of 8 at delta 1e-04; one record added or removed; PLD; Poisson "
        "sampling"
    ) in tiles
    assert re.search(r"Held-out epsilon 7\.\d\d of 8 ", tiles)
    assert re.search(r"Held-out loss ~0\.\d+ .* Accuracy ~6\d\.\d % with noise", tiles)
    assert "Training loss</th>" not in page
    assert "Shaded: two standard deviations of the noise" in page
    assert "3 completed 7.92 ~0." in _section(page, "rounds")


def test_noise_on_results_of_an_own_objective_has_no_size():
    """No event holds it, so nothing is shaded, and there is no accuracy to mark."""
    sums = MetricSums(count=90, loss_sum=45.0, metrics={"error": 9.0})
    log = [
        replace(event, task="mine:loss")
        if isinstance(event, RunStarted)
        else replace(event, pooled=sums, by_site=(sums, sums))
        if isinstance(event, ModelEvaluated)
        else event
        for event in event_samples.private(3)
    ]
    page = page_with(fold(log), "loss", "accuracy")
    assert 'id="figure-loss"' in page
    assert "Shaded" not in page
    assert "~-" not in page


def test_joint_noise_needs_the_sum():
    """Whose records, whose noise, against whom; and what would break it."""
    text = _section(page_of("joint"), "privacy")
    for words in (
        "from the sums of the sites&#39; updates",
        f"Holds against: {event_samples.HOLDS_AGAINST['joint']}",
        "gcp-us-central1 7.76 8 1e-04 0.900 0.05 1",
        "what one record can change",
        "The noise of all sites adds up",
        "The guarantee needs secure aggregation",
        "A person with several records",
    ):
        assert words in text


def test_whole_sites_are_not_taken_for_records():
    """No sampling, no records; how far updates stand out of the noise."""
    page = page_of("whole sites")
    text = _section(page, "privacy")
    for words in (
        "all that any one site holds",
        "Signal-to-noise ratio 1.4",
        "clinic-16 7.92 8 1e-04 0.900 Epsilon: one site",
        "what one site can change",
        "Participation and timing of a site",
        "no epsilon covers what they reveal about a site",
        "Every run on the same sites spends more",
    ):
        assert words in text
    for words in ("Sampling rate", "A person with several records", "Held-out noise:"):
        assert words not in text
    assert "Signal to noise 1.4 " in _section(page, "summary")
    about_epsilon = page.split('id="figure-epsilon"')[1].split("</figure>")[0]
    assert "Spent by every site" in about_epsilon
    assert 'class="key"' not in about_epsilon
    protection = _section(page, "reading")
    assert "the model reveal about all that any one site holds is bounded" in protection


def test_public_held_out_results_are_called_so():
    """No mark, no noise, no budget; and the page says what that leaves open."""
    page = page_with(fold(event_samples.private(2, public=True)))
    assert "Held-out epsilon none" in _section(page, "summary")
    assert "~" not in _section(page, "rounds")
    assert "no epsilon covers the held-out records" in _section(page, "privacy")


def test_spending_beyond_the_cap_stands_out():
    """A site that says so has broken its promise."""
    events = [
        replace(event, spent=replace(event.spent, epsilon=8.5))
        if isinstance(event, SiteAnswered)
        else event
        for event in event_samples.private(1)
    ]
    page = page_with(fold(events))
    assert '<td class="n bad">8.50</td>' in page
    assert '<td class="n bad">7' not in page


def test_run_without_privacy_claims_none():
    """No section, no tile, no figure."""
    page = page_of("quiet")
    assert 'id="privacy"' not in page
    assert ">differential privacy</span>" not in page
    assert "Epsilon" not in page
    assert "epsilon" not in draw_all(fold(event_samples.two_sites(2)), {"epsilon"})


def test_figures_can_be_left_out():
    """A page has those that it is given, and of a run the named ones are drawn."""
    view = fold(RUNS["quiet"])
    assert figures_of(page_with(view, "loss")) == {"loss"}
    assert figures_of(page_with(view)) == set()


def figures_of(page: str) -> set[str]:
    """Names of the figures of a page."""
    return set(re.findall(r'<svg class="plot" role="img" aria-label="([^"]*)"', page))


def test_values_show_under_the_pointer_without_a_script():
    """Each round of a curve has its line of values, hidden by an attribute."""
    view = fold(event_samples.two_sites(4))
    drawn = draw_all(view, {"loss"})["loss"]
    assert drawn.count('<g class="at">') == drawn.count('visibility="hidden"') == 5
    for row in view.rounds:
        values = drawn.split(f">after round {row.index}<")[1].split("</text>")[0]
        assert f">all sites {row.loss:.4g}<" in values
        assert f">training {row.training_loss:.4g}<" in values
    long = draw_all(fold(event_samples.two_sites(400)), {"loss"})["loss"]
    assert long.count('<g class="at">') <= MAX_READOUTS


def test_pages_allow_no_script_and_no_network():
    """The policy is as strict as it was, with switches and values on the page."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in page_of(
        "quiet"
    )


@pytest.mark.slow
def test_figures_are_reproducible_and_leave_no_trace():
    """The same run gives the same bytes, and matplotlib's settings stay."""
    view, before = fold(event_samples.troubled()), dict(mpl.rcParams)
    page = page_of("troubled")
    for name, svg in draw_all(view, {"loss", "data", "timeline"}).items():
        assert svg in page, name
    assert before == dict(mpl.rcParams)


def test_text_of_the_run_is_escaped():
    """Names, messages and job files stay text, in tables and in figures."""
    sites = (HOSTILE, "gcp")
    script = Script(
        sites=sites,
        rounds=2,
        failures=((1, HOSTILE, FailureKind.CRASHED),),
        message=HOSTILE,
        warning=HOSTILE,
        job_name=HOSTILE,
        labels=(HOSTILE, "日本語"),
    )
    page = render(fold(run(script)), HOSTILE, {HOSTILE: HOSTILE})
    assert "script" not in _read(page).tags
    assert "<script" not in page
    assert "&lt;script&gt;alert(" in page


LARGEST = sys.float_info.max


@pytest.mark.slow
@pytest.mark.parametrize(
    "extreme",
    [LARGEST, pytest.param(-LARGEST, marks=pytest.mark.long), math.nan],
)
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::UserWarning")
def test_no_number_of_a_site_spoils_the_report(extreme: float):
    """What the wire lets through is shown or left out: a run has its end."""
    sums = MetricSums(count=1, loss_sum=extreme, metrics={"correct": 1})
    phases = tuple(
        Phase(name=f"phase {number}", start_seconds=start, seconds=LARGEST)
        for number, start in enumerate((0.0, LARGEST) * 32)
    )
    spent = PrivacySpent(epsilon=LARGEST, delta=0.5, held_out_epsilon=LARGEST)
    used = Resources(
        busy_seconds=LARGEST, cpu_seconds=LARGEST, peak_memory_bytes=2**53, method="x"
    )
    told = {"training": sums, "evaluation": sums, "phases": phases, "spent": spent}
    told["resources"] = used
    events = event_samples.private(2)
    for kind, lie in (
        (SiteAnswered, told),
        (ModelEvaluated, {"pooled": sums, "by_site": (sums, sums)}),
    ):
        index = next(i for i, event in enumerate(events) if isinstance(event, kind))
        events[index] = replace(events[index], **lie)
    assert "phase 1" not in render(fold(events), JOB, VERSIONS)
    with PlainProgress(io.StringIO()) as progress:
        for event in events:
            progress(event)


def test_energy_is_shown_where_it_came_and_said_to_be_unknown_elsewhere():
    known = Energy(joules=(2.2e6, 2.5e6), grams=(220.0, 250.0), method="RAPL")
    used = Resources(
        busy_seconds=1.0, cpu_seconds=1.0, peak_memory_bytes=None, method="process"
    )
    reported = {"aws": known, "gcp": UNKNOWN_ENERGY}

    def reporting(energies: Mapping[str, Energy | None]) -> RunView:
        return fold(
            [
                replace(event, resources=replace(used, energy=energies[event.site[:3]]))
                if isinstance(event, SiteAnswered)
                else event
                for event in event_samples.two_sites(2)
            ]
        )

    page = page_with(reporting(reported))
    for shown in (
        "4,400 to 5,000 kJ",
        "440 to 500 g",
        ">unknown<",
        "(RAPL), unknown for 1",
    ):
        assert shown in page, shown
    assert "2 of 2 sites" in page
    assert ">Energy<" not in page_with(reporting(dict.fromkeys(reported)))
    first, *_ = result(reporting({**reported, "gcp": None}))["sites"]
    assert first["resources"]["energy"]["joules"] == (4.4e6, 5e6)


def test_a_total_of_energy_is_unknown_if_a_part_is():
    """It would be less than what was taken; and no site can make it infinite."""
    used = Resources(
        busy_seconds=1.0, cpu_seconds=1.0, peak_memory_bytes=None, method="process"
    )
    known = Energy(joules=(1.0, LARGEST), grams=None, method="RAPL")
    for parts, joules in (
        ([known, known], (2.0, 1e15)),
        ([known, UNKNOWN_ENERGY], None),
        ([known, None], None),
    ):
        found = total([replace(used, energy=energy) for energy in parts])
        assert found is not None
        assert found.energy is not None
        assert (found.energy.joules, found.energy.grams) == (joules, None)
    assert total([used, used]) == replace(used, busy_seconds=2.0, cpu_seconds=2.0)


@pytest.mark.slow
def test_many_sites_and_labels_are_cut_and_counted():
    """Hundreds of sites do not blow the page up, and it says what is missing."""
    view = fold(event_samples.many_sites(1000, 3))
    page = render(view, JOB, VERSIONS)
    assert MAX_SITES_SHOWN == len(view.shown_sites) == len(site_colours(view))
    assert all(site.failures for site in view.shown_sites)
    assert f"Figures show {MAX_SITES_SHOWN} of 1,000 sites" in page
    assert "100 of 1,000 sites; result.json has all" in page
    assert len(page) < 1_000_000
    labels = tuple(f"class-{number}" for number in range(100))
    view = fold(run(Script(rounds=1, labels=labels)))
    assert ">other<" in draw_all(view, {"data"})["data"]


@pytest.mark.parametrize(("cloud", "shown"), [("aws", "us-east-1"), ("local", "-")])
def test_places_of_sites_are_those_of_the_job(cloud: str, shown: str):
    """Where nothing else says them, as in a deployed run."""
    site = {"name": "aws-us-east-1", "cloud": cloud, "region": "us-east-1"}
    job = tomli_w.dumps({"sites": [site]})
    page = render(fold(RUNS["only started"]), job, VERSIONS, figures=())
    assert page.count(f"<td>{shown}</td>") >= 1
    assert ("<td>us-east-1</td>" in page) == (cloud == "aws")


def test_unfinished_run_says_so():
    """A killed coordinator's report does not look like a finished one."""
    page = page_with(fold(event_samples.two_sites(2)[:-1]))
    assert "not finished" in page
    assert "its coordinator was killed" in page


def test_every_failure_kind_is_explained():
    """A new kind needs its sentence on the page."""
    assert set(FailureKind) == set(FAILURE_MEANINGS)


def test_report_is_written_whole(tmp_path: Path):
    """An older report is replaced and nothing else is left."""
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(fold(RUNS["only started"]), JOB, VERSIONS, path)
    assert path.read_text(encoding="utf-8").endswith("</html>")
    assert [path] == list(tmp_path.iterdir())


def test_unwritable_report_is_a_store_error(tmp_path: Path):
    """The operating system's error arrives as the store's."""
    view = fold(RUNS["only started"])
    with pytest.raises(StoreUnavailable, match="cannot write the report"):
        write_report(view, JOB, VERSIONS, tmp_path / "missing" / "report.html")


def test_waiting_and_participation_are_in_the_report():
    """What waiting has cost, who caused it, and how fairly updates counted."""
    first, *rest = RUNS["quiet"]
    view = fold([replace(first, engine="virtual"), *rest])
    shown = html.unescape(_section(page_with(view), "sites")).lower()
    waiting, fairness = view.participation.words()
    assert waiting.lower() in shown
    assert fairness.lower() in shown


def test_what_stores_were_used_for():
    """By store, user, way and operation, with a line of totals and the cache."""
    text = _section(page_of("stored"), "storage")
    run_in_bucket = "s3://federation-runs/experiments/two-clouds/20260101-000000-abcdef"
    assert f"{run_in_bucket} coordinator same region put 3 7 - 2.0 MB - 1.5 s" in text
    assert "stat 2 2 1 - - 0.2 s" in text
    assert "internet read 2 3 - - 5.0 MB 0.2 s" in text
    assert "served from cache 4 - - - 12.5 MB -" in text
    assert "All stores 9 15 1 2.0 MB 10.0 MB 2.2 s" in text
    assert "saved 4 reads of 12.5 MB" in text
