"""A site's own page: for its operator, and no other user of the host."""

import socket
from dataclasses import replace
from html import unescape
from pathlib import Path

import httpx
import pytest
from prometheus_client import parser as node_exporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support import agents

from clients.privacy.ledger_memory import LifetimeBudget, RememberedLedger
from deploy.site_host import run_status, site_metrics, site_page
from deploy.site_host.config import SiteConfig, SitePageSpec
from deploy.site_host.machine_use import Counters, UseLog
from deploy.site_host.run import runs_folder, site_memory
from deploy.site_host.run_status import RunStatus
from deploy.site_host.site_metrics import SiteCollector
from federation.clock import SystemClock, VirtualClock
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import InMemoryLedger
from privacy.dp.ledger.ledger_format import Terms

HOSTILE = "<script>alert(1)</script>"
RUN = RunStatus(
    run_id="20260101-000000-abcdef",
    job=HOSTILE,
    state="begun",
    rounds=9,
    answered=4,
    last_round=4,
    at=0.0,
    data="own data",
    sent=("its update, readable only in a sum", "the number of steps"),
    epsilon_cap=8.0,
    epsilon=3.25,
    bytes_down=3_000_000,
    bytes_up=2_000_000,
    seconds=75.0,
)
STEP = PrivacyEvent(noise_multiplier=4.0, sampling_rate=1.0, steps=1)


def _config(folder: Path, port: int) -> SiteConfig:
    policy = {**agents.OPEN_POLICY, "total_epsilon": 20.0}
    config = agents.site_config(
        folder, "site-a", policy=policy, compute={"grams_per_kwh": 360.0}
    )
    file = replace(config.file, monitor=SitePageSpec(port=port))
    return replace(config, file=file)


def _fill(config: SiteConfig) -> None:
    """What a site has once runs on two datasets have spent, on a busy machine."""
    folder = runs_folder(config) / RUN.run_id
    folder.mkdir(parents=True)
    run_status.saver(folder)(RUN)
    clock = VirtualClock(1e9)
    for number, name in enumerate(("cohort", "imaging"), start=1):
        terms = Terms(
            run_id=f"run-{number}",
            site="site-a",
            job_digest="ab" * 32,
            delta=1e-5,
            epsilon_cap=8.0,
        )
        ledger = RememberedLedger(
            InMemoryLedger(terms, clock=clock),
            site_memory(config),
            LifetimeBudget(dataset=name),
        )
        for index in range(number):
            ledger.charge(STEP, round_index=index)
    busy = iter((0.0, 3.0, 3.0))

    def read() -> Counters:
        return Counters(
            cpu_seconds=next(busy),
            cpus=4,
            memory_bytes=1 << 30,
            network_bytes=0,
            disk_bytes=0,
            gpu_share=0.5,
            gpu_memory_bytes=1 << 30,
        )

    log = UseLog(
        folder=config.folder,
        clock=clock,
        is_at_work=lambda: True,
        read=read,
        grams_per_kwh=360.0,
    )
    log.look()
    clock.sleep(1.0)
    log.look()
    log.save()


@pytest.mark.slow
def test_operator_sees_what_left_the_site(tmp_path: Path) -> None:
    """With the token alone; what a job's owner has named is text."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said: list[str] = []
        config = _config(tmp_path, port)
        # A page is no reason not to take part in runs.
        with site_page.served(config, clock=SystemClock(), listener=said.append):
            assert f"port {port}" in said[0]
    _fill(config)
    with site_page.served(config, clock=SystemClock(), listener=said.append):
        address = site_page.address(config)
        assert httpx.get(address.partition("?")[0]).status_code == 403
        with httpx.Client(follow_redirects=True) as browser:
            answered = browser.get(address).text
        metrics = f"http://127.0.0.1:{port}/metrics"
        assert httpx.get(metrics).status_code == 403
        token = (tmp_path / "metrics.token").read_text()
        bearer = {"Authorization": f"Bearer {token}"}
        scraped = httpx.get(metrics, headers=bearer)
        assert httpx.get(f"{metrics}/../", headers=bearer).status_code == 403
    page = unescape(answered)
    assert said[1:] == []
    found = run_status.status(config)
    # What the terminal says, from the same source; the rest depends on the moment.
    for head, rows in (*run_status.about(found, 2e9), *run_status.of_runs(found, 2e9)):
        for words in (head, *(text for _, texts in rows for text in texts)):
            assert " ago" in words or words in page, words
    spent = {each.name: each.epsilon for each in found.datasets}
    assert [*spent] == ["cohort", "imaging"]
    assert 0 < spent["cohort"] < spent["imaging"]
    for words in (
        *RUN.sent,
        *("4 of 9 answered", "3.25 of 8 on training, 4.75 left", "end not known"),
        *("3.0 MB received, 2.0 MB sent", "1 min 15 s"),
        *("all runs on 'imaging'", " of 20 spent", "GPUs 50%", "gCO2e"),
    ):
        assert words in page, words
    assert HOSTILE not in answered
    for name in ("page.token", "metrics.token"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    samples = {
        (
            each.name,
            *(v for k, v in sorted(each.labels.items()) if k != "run"),
        ): each.value
        for family in text_string_to_metric_families(scraped.text)
        for each in family.samples
    }
    assert samples["crossfed_agent_run_epsilon_left", HOSTILE] == 4.75
    assert samples["crossfed_agent_run_rounds_answered", HOSTILE] == RUN.answered
    assert samples["crossfed_agent_run_bytes_total", "up", HOSTILE] == RUN.bytes_up
    assert samples["crossfed_agent_dataset_epsilon", "imaging"] == spent["imaging"]
    # Of the machine, what the text file collector of a node exporter reads.
    of_machine = {
        (each.name, *(v for _, v in sorted(each.labels.items()))): each.value
        for family in node_exporter.text_string_to_metric_families(
            (tmp_path / "use.prom").read_text()
        )
        for each in family.samples
    }
    assert len(of_machine) > 15
    for key, value in of_machine.items():
        assert samples[key] == pytest.approx(value), key


def test_operator_reads_when_the_certificate_is_renewed_next(tmp_path: Path) -> None:
    """A site without an agent reads that nothing renews it."""
    found = run_status.status(_config(tmp_path, 0))
    for days, is_up, words in (
        (40.0, True, "renews it in 10 d"),
        (20.0, True, "renews it now"),
        (40.0, False, "that renews it"),
    ):
        seen = replace(found, is_up=is_up, certificate_ends=days * 86_400)
        assert words in "\n".join(run_status.lines(seen, 0.0))


def test_page_reads_the_newest_runs_alone(tmp_path: Path) -> None:
    """It is asked for every few seconds, and a site may keep 10,000 runs."""
    config = _config(tmp_path, 0)
    for number in range(5):
        folder = runs_folder(config) / f"2026010{number}-000000-abcdef"
        folder.mkdir(parents=True)
        run_status.saver(folder)(replace(RUN, run_id=folder.name))
    newest = [run.run_id[:8] for run in run_status.status(config, 2).runs]
    assert newest == ["20260103", "20260104"]
    assert len(run_status.status(config).runs) == 5


def test_number_of_series_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site may keep 10,000 runs, and their names are the aggregator's."""
    monkeypatch.setattr(site_metrics, "MAX_RUNS", 2)
    config = _config(tmp_path, 0)
    for number in range(5):
        folder = runs_folder(config) / f"2026010{number}-000000-abcdef"
        folder.mkdir(parents=True)
        run_status.saver(folder)(replace(RUN, run_id=folder.name))
    labels = [
        sample.labels
        for family in SiteCollector(config).collect()
        for sample in family.samples
    ]
    assert {each["run"][:8] for each in labels if "run" in each} == {
        *("20260103", "20260104")
    }
