"""What a private, secure run leaves holds nothing that the table forbids."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.wiring import parts as wiring
from deploy.wiring.run_record import RunRecord
from deploy.wiring.store_meters import StoreMeters
from federation.clock import SystemClock
from federation.event_log import read_events
from federation.events import Event, RunStarted, SiteAnswered
from federation.ids import RunId
from federation.job.disclosure import Exposure, hidden
from federation.job.spec import JobSpec
from federation.messages import MetricSums, SiteEvaluation, SiteUpdate
from federation.wire import frame as wire
from monitoring.pages import report
from monitoring.runs.run_folder import RunFolder, leave_report
from monitoring.terminal.progress import PlainProgress

pytestmark = pytest.mark.slow

PRIVATE = {"unit": "record", "target_epsilon": 50.0, "clip_norm": 1.0}
# Of each site: it occurs in no number that may be shown.
SIZE = 1013
LOSS, EXAMPLES = 7717.25, 98_431_207
SECURE = {"enabled": True, "threshold": 4}


def job_of(**privacy: Any) -> JobSpec:
    """Five sites and two rounds."""
    return small_job(
        num_sites=5,
        rounds=2,
        data={
            "source": "support.small_jobs:blobs",
            "options": {"num_train": 5 * SIZE},
        },
        privacy=privacy,
        training={"local_steps": 1, "batch_size": 4, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
    )


JOBS = [
    job_of(differential_privacy=PRIVATE),
    job_of(secure_aggregation=SECURE),
    job_of(differential_privacy=PRIVATE, secure_aggregation=SECURE),
]


@pytest.mark.parametrize("job", JOBS, ids=["private", "secure", "both"])
def test_a_run_leaves_nothing_forbidden(job: JobSpec, tmp_path: Path) -> None:
    """Neither in its log of events, nor in what is made of it."""
    heard: list[Event] = []
    simulate(job, folder=tmp_path / "run", listeners=[heard.append])
    setting = Exposure.of(job, deployed=False)
    for event in (*heard, *read_events(tmp_path / "run" / "events.jsonl")):
        for name in hidden(type(event).__name__, setting):
            assert getattr(event, name) in {None, ()}
    if not setting.private:
        return  # Whoever simulates may see how the simulation splits the data.
    run = RunFolder(tmp_path / "run")
    page = report.render(run.view(), run.read_job(), {}, figures=())
    for text in (run.events.read_text(), run.result.read_text(), page):
        # Tags of pages have digests and sizes of their own.
        assert not re.search(rf"(?<![\w.]){SIZE:,}|(?<![\w.]){SIZE}(?![\w.])", text)


@pytest.mark.parametrize("job", [job_of(), JOBS[0]], ids=["open", "private"])
def test_what_may_not_be_known_is_not_sent(job: JobSpec, tmp_path: Path) -> None:
    """The aggregator is the adversary: it need not obey a table.

    How long private steps take grows with the batches that were drawn.
    """
    simulate(job, transcript=tmp_path / "seen")
    messages = [
        wire.decode(path.read_bytes())
        for path in (tmp_path / "seen").rglob("*")
        if path.is_file() and path.read_bytes().startswith(wire.MAGIC)
    ]
    updates = [m for m in messages if isinstance(m, SiteUpdate)]
    answers = [m for m in messages if isinstance(m, SiteUpdate | SiteEvaluation)]
    assert len(updates) == 2 * 5 < len(answers)
    is_private = job.privacy.differential_privacy.enabled
    assert {bool(answer.phases) for answer in answers} == {not is_private}
    methods = {update.resources and update.resources.method for update in updates}
    assert methods == ({None} if is_private else {"thread"})


@pytest.mark.parametrize("job", JOBS, ids=["private", "secure", "both"])
def test_an_event_that_says_too_much_is_concealed(job: JobSpec, tmp_path: Path) -> None:
    """Whoever emits it: file, terminal and report see what the table allows."""
    federation, clock = wiring.build_federation(job), SystemClock()
    heard: list[Event] = []
    terminal = io.StringIO()
    started, *_ = samples = event_samples.two_sites(2)
    record = RunRecord(
        job,
        RunFolder(tmp_path / "run"),
        RunId("20260101-000000-000000"),
        pool=federation.pool,
        clock=clock,
        meters=StoreMeters(clock),
        introduce=lambda: (),
        listeners=[heard.append, PlainProgress(terminal)],
    )
    with record._open():
        record.emit(started)
        for event in samples:
            if isinstance(event, SiteAnswered):
                # Larger than any other: nothing that shows it goes unseen.
                own = MetricSums(count=8, loss_sum=8 * LOSS, metrics={"correct": 1})
                record.emit(replace(event, training=own, num_examples=EXAMPLES))
            elif not isinstance(event, RunStarted):
                record.emit(event)
    written = read_events(tmp_path / "run" / "events.jsonl")
    whole = leave_report(RunFolder(tmp_path / "run"))
    shown = (tmp_path / "run" / "events.jsonl").read_text() + whole.read_text()
    for text in (shown, terminal.getvalue()):
        assert str(EXAMPLES) not in text
        assert f"{EXAMPLES:,}" not in text
        assert f"{LOSS:.2f}" not in text
    assert "round" in terminal.getvalue()
    answers = [e for e in (*written, *heard) if isinstance(e, SiteAnswered)]
    assert len(answers) >= 4
    for answer in answers:
        assert answer.training is None
        assert answer.num_examples is None
        if job.privacy.secure_aggregation.enabled:
            assert answer.phases == ()
            assert answer.evaluation is None
