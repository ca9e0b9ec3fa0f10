"""Live pages in Debian's chromium: what a person sees, and reaches by keyboard."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from matplotlib.image import imread
from support import browser, event_samples
from support.browser import Tab
from support.deployment import wait_for
from support.event_samples import Script
from support.programs import AXE, AXE_SCRIPT, needs
from support.small_jobs import small_job

from deploy.aggregator_host import run_list
from deploy.aggregator_host.enrolment_operator import SiteRow
from deploy.site_host import run_status
from deploy.site_host.machine_use import MachineUse
from deploy.site_host.run_status import DatasetSpent, RunStatus, SiteStatus
from deploy.web_server import serving
from federation.clock import SystemClock
from federation.event_log import EventWriter
from federation.events import Event
from federation.messages import FailureKind
from monitoring.runs.run_folder import RunFolder
from monitoring.web.app import Shown, live_app, site_app
from monitoring.web.run_metrics import RunsCollector

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.xdist_group("browser"),
    needs("chromium"),
]

TOKEN, NAME = "a-token", "20260101-000000-abcdef"
SITES = event_samples.TWO_SITES
EVENTS = event_samples.run(
    Script(
        rounds=6,
        epsilon_cap=8.0,
        failures=((3, SITES[1], FailureKind.UNREACHABLE),),
        start=SystemClock().now() - 60.0,
    )
)
HALF = 2 * len(EVENTS) // 3
QUEUED = {
    "run": "20260102-000000-abcdef",
    "job": "next",
    "owner": "ann",
    "priority": 2,
    "waits": f"run 20260102-000000-abcdef waits for a slot at {SITES[0]}",
    "starts_in_seconds": 320.0,
}
LISTED = SiteRow(
    site=SITES[0],
    state="enrolled",
    at=9e9,
    last_answer=EVENTS[0].at,
    steps_per_second=12.5,
)
FOCUSED = """(e => [e.tagName, (e.innerText || '').trim(),
getComputedStyle(e).outlineStyle])(document.activeElement)"""


# What a phone cuts, with values as wide as those of a long run.
CUT = """[...document.querySelectorAll('.tile .value, .bars .row > span, .status')]
.filter(e => !e.innerText.includes('-'))  // Long names of sites may be cut.
.map(e => { if (e.className === 'value') e.textContent = '6 min 58 s'; return e; })
.filter(e => e.scrollWidth > Math.max(e.clientWidth, e.offsetWidth)
|| e.getBoundingClientRect().right > 320).map(e => e.innerText)"""


class Place:
    """A run that goes on, and the page that shows it."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder / "job" / NAME)
        self.stopped = False
        self.write(EVENTS[:HALF])

    def write(self, events: list[Event]) -> None:
        with EventWriter(self.run.events) as log:
            for event in events:
                log(event)

    def stop(self, _: RunFolder) -> None:
        self.stopped = True

    def shown(self) -> Shown:
        return Shown(
            rows=lambda: [{**run_list.summary(self.run), "name": NAME}],
            find={NAME: self.run}.get,
            actions={"stop": self.stop, "resume": self.stop},
            queue=lambda: [QUEUED],
            sites=lambda: [asdict(LISTED)],
        )


@pytest.fixture(name="tab", scope="module")
def _tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser.tab(tmp_path_factory.mktemp("browser")) as found:
        found.resize(1280, 900)
        yield found


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    with place.run.locked():
        yield place


@pytest.fixture(name="address")
def _address(place: Place, tab: Tab) -> Iterator[str]:
    clock = SystemClock()
    with serving(
        lambda port: live_app(place.shown(), token=TOKEN, port=port, clock=clock),
        0,
        clock=clock,
        last_look_seconds=0.0,
    ) as port:
        tab.go(f"http://127.0.0.1:{port}/?token={TOKEN}")
        yield f"http://127.0.0.1:{port}"
        tab.go("data:,")  # Lets the server end at once.


def _open(tab: Tab, address: str) -> None:
    tab.go(f"{address}/runs/{NAME}")
    tab.wait("document.querySelectorAll('#charts canvas').length >= 5")


def test_page_follows_a_run_without_being_loaded_again(
    tab: Tab, address: str, place: Place
) -> None:
    _open(tab, address)
    tab.value("window.isTheSame = true")
    assert tab.value("document.getElementById('line').textContent") == "live"
    assert "4 of 6" in tab.value("document.querySelector('.tiles').innerText")
    assert tab.value("document.querySelectorAll('.bars i').length > 10")
    # A link leads to its section, and no two places have one name.
    assert tab.value("document.getElementById('privacy').innerText.length > 100")
    names = "[...document.querySelectorAll('[id]')].map(e => e.id)"
    assert tab.value(f"new Set({names}).size === {names}.length")
    place.write(EVENTS[HALF:])
    tab.wait("document.getElementById('line').textContent === 'ended'")
    assert "6 of 6" in tab.value("document.querySelector('.tiles').innerText")
    assert tab.value("window.isTheSame")
    assert tab.value("[...document.querySelectorAll('nav form')].every(f => f.hidden)")


def test_page_of_a_run_that_begins_anew_keeps_nothing(
    tab: Tab, address: str, place: Place
) -> None:
    """Neither curves nor bars; those of the new run take their place."""
    _open(tab, address)
    place.run.events.unlink()
    place.write(EVENTS[:1])
    tab.wait("document.querySelectorAll('#charts canvas').length === 0")
    assert tab.value("document.querySelectorAll('.bars').length") == 0
    for place_of in ("charts", "timeline"):  # No heading stands over nothing.
        hidden = f"document.getElementById('{place_of}').parentElement.offsetParent"
        assert tab.value(f"{hidden} === null")
    place.write(EVENTS[1:])
    tab.wait("document.querySelectorAll('#charts canvas').length >= 5")


def test_everything_can_be_reached_and_done_by_keyboard(
    tab: Tab, address: str, place: Place
) -> None:
    """Each place that has the focus shows it; a button that does nothing is skipped."""
    _open(tab, address)
    found = []
    while not found or found[-1][0] != "PRE":
        tab.press("Tab")
        found.append(tab.value(FOCUSED))
        assert len(found) < 40
    assert [words for tag, words, _ in found if tag in {"A", "BUTTON"}][:2] == [
        "All runs",
        "Stop after this round",
    ]
    assert "Resume" not in {words for _, words, _ in found}
    assert {outline for *_, outline in found} == {"solid"}
    tab.value("document.querySelector('nav a').focus()")
    tab.press("Tab")
    tab.press("Enter")
    wait_for(lambda: place.stopped, "the run is asked to stop")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_follow_the_scheme(
    tab: Tab, address: str, scheme: str, tmp_path: Path
) -> None:
    tab.prefer(scheme)
    tab.resize(320, 640)
    try:
        for path, last in (("/", "td .status"), (f"/runs/{NAME}", ".bars .row")):
            tab.go(address + path)
            tab.wait(f"document.querySelector('{last}') !== null")
            assert tab.value("document.documentElement.scrollWidth") == 320
            assert tab.value(CUT) == [], path
            shade = tab.value(
                "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g)"
            )
            assert (int(shade[0]) < 128) == (scheme == "dark")
            tab.screenshot(tmp_path / "page.png")  # Nor does a card or chart glare.
            bright = imread(tmp_path / "page.png")[..., :3].min(axis=-1) > 0.7
            assert (bright.mean() < 0.2) == (scheme == "dark"), (path, bright.mean())
    finally:
        tab.resize(1280, 900)
        tab.prefer("light")


STATUS = SiteStatus(
    site="clinic-a",
    is_up=True,
    last_contact=0.0,
    certificate_ends=9e9,
    datasets=[DatasetSpent(name="own data", epsilon=3.0, epsilon_cap=20.0)],
    use=MachineUse(since=0.0, at=1.0, methods=("model",), cpus=4, gpu_share=0.5),
    runs=[
        RunStatus(
            run_id=NAME,
            job=small_job(num_sites=1).name,
            state="begun",
            rounds=9,
            answered=4,
            last_round=4,
            at=0.0,
            data="own data",
            sent=("its update, readable only in a sum", "the number of steps"),
        )
    ],
)


@needs(AXE)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(tab: Tab, address: str, scheme: str) -> None:
    """In lists, in a run, and in a site's own page."""
    clock = SystemClock()
    status = {
        "site": STATUS.site,
        "about": [*run_status.about(STATUS, 9.0)],
        "runs": [*run_status.of_runs(STATUS, 9.0)],
    }
    tab.prefer(scheme)
    tab.call("Page.setBypassCSP", enabled=True)
    with serving(
        lambda port: site_app(
            lambda: status,
            token=TOKEN,
            port=port,
            metrics=RunsCollector(list),
            metrics_token="",
        ),
        0,
        clock=clock,
        last_look_seconds=0.0,
    ) as port:
        site = f"http://127.0.0.1:{port}/?token={TOKEN}"
        for page in (address, f"{address}/runs/{NAME}", site):
            tab.go(page)
            tab.wait("document.body.innerText.length > 100")
            tab.value(AXE_SCRIPT.read_text(encoding="utf-8") + ";0")
            found = json.loads(tab.value("axe.run().then(r => JSON.stringify(r))"))
            serious = [
                (each["id"], each["impact"], [n["html"] for n in each["nodes"]][:3])
                for each in found["violations"]
                if each["impact"] in {"serious", "critical"}
            ]
            assert serious == [], page
            assert len(found["passes"]) > 10
    tab.call("Page.setBypassCSP", enabled=False)
    tab.prefer("light")
