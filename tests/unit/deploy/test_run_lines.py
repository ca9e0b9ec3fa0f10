"""What a site's operator reads of runs that train nothing."""

from typing import Any

import numpy as np
import pytest
from support import toy
from support.small_jobs import small_job

from deploy.site_host.run_lines import RunLines
from deploy.site_host.run_status import RunStatus, sent_by
from federation.clock import VirtualClock
from federation.ids import RunId, SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import MetricSums, RoundTask, SiteEvaluation, TaskKind
from federation.wire import frame as wire

RUN, SITE = RunId("20260102-030405-abcdef"), SiteId("site-0")
MODEL = {
    "factory": "clients.models:logistic_regression",
    "options": {"inputs": 4, "classes": 3},
    "weights": f"model.npz@{'0' * 64}",
}
NOISE = {"differential_privacy": {"unit": "record", "target_epsilon": 8.0}}
SECURE = {"secure_aggregation": {"enabled": True, "two_sites_waiver": True}}


def statistics(**privacy: Any) -> JobSpec:
    asked = {"columns": [{"names": ["age"], "low": 0.0, "high": 100.0}]}
    names = [{"name": f"site-{at}"} for at in range(2)]
    document = {"name": "s", "statistics": asked, "sites": names, "privacy": privacy}
    return job_file.parse(document)


def evaluation(**privacy: Any) -> JobSpec:
    weights = {"weights": "uniform"}
    return small_job(
        num_sites=2, rounds=0, model=MODEL, privacy=privacy, aggregation=weights
    )


def _task(kind: TaskKind, index: int) -> RoundTask:
    return RoundTask(
        run_id=RUN,
        round_index=index,
        site=SITE,
        kind=kind,
        layout_digest="0" * 64,
        weights_d=np.zeros(1, np.float32),
        integers_m=np.zeros(0, np.int64),
        evaluate=True,
        evaluate_after=False,
    )


@pytest.mark.parametrize(
    ("job", "first"),
    [
        (small_job(num_sites=2), "its update"),
        (statistics(), "sums over its records"),
        (statistics(**SECURE, **NOISE), "sums over its records with noise, readable "),
        (evaluation(), "held-out results"),
        (evaluation(**NOISE), "held-out results with noise"),
        (evaluation(**SECURE), "held-out results, readable only in a sum"),
    ],
)
def test_operator_reads_what_leaves(job: JobSpec, first: str):
    what, *more = sent_by(job)
    assert what.startswith(first)
    private = job.privacy.differential_privacy.enabled
    assert ("its spent epsilon" in more) == private
    trains = job.rounds > 0 and job.statistics is None
    assert ("the training loss" in more) == trains
    if not trains:
        assert not {"held-out results", "the number of steps"} & {*more}
    secure = job.privacy.secure_aggregation.enabled
    hidden = private or secure or not (trains or job.statistics)
    reported = "".join(sent_by(job, reports_energy=True))
    assert ("energy" in reported) is not hidden
    assert "energy" not in "".join(more)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("every", [0, 1])
def test_operator_reads_every_field_that_leaves(
    every: int, *, private: bool, secure: bool
):
    """By hand, from the threat model: alone, in a sum, with noise or not at all."""
    privacy = (NOISE if private else {}) | (SECURE if secure else {})
    weights = {"weights": "uniform" if private else "examples"}
    job = small_job(
        num_sites=2,
        privacy=privacy,
        aggregation=weights,
        evaluation={"every": every},
    )
    only = ", readable only in a sum" if secure else ""
    noise = " with noise" if private else ""
    assert {*sent_by(job)} == {
        f"its update{only}",
        *([] if private else [f"the number of training examples{only}"]),
        *([] if secure else ["the number of steps"]),
        *([] if private else [f"the training loss{only}"]),
        *([f"held-out results{noise}{only}"] if every else []),
        *([] if private or secure else ["how long it worked on what"]),
        *([] if private or secure else ["processor time and memory"]),
        *(["its spent epsilon"] if private else []),
    }


def test_rounds_are_counted_over_all_coordinators():
    """Also those that run again after a checkpoint, each once."""
    job, saved, before = small_job(num_sites=2, rounds=9), list[RunStatus](), None
    took = [0, 0, 0.0]  # And so is what they took.
    for first, last, answered in ((1, 4, 4), (3, 6, 6), (8, 9, 8)):
        lines = RunLines(
            RUN,
            job=job,
            promise=None,
            data="own data",
            listener=lambda _: None,
            total=str,
            save=saved.append,
            clock=VirtualClock(),
            audit=lambda *_: None,
            before=before,
        )
        lines.accept()
        for index in range(first, last + 1):
            task, answer = _task(TaskKind.TRAIN, index), toy.update(round_index=index)
            lines.note(task, answer, 2.0)
            new = wire.encoded_size(task), wire.encoded_size(answer), 2.0
            took = [old + more for old, more in zip(took, new, strict=True)]
        before = saved[-1]
        assert [before.bytes_down, before.bytes_up, before.seconds] == took
        assert (before.answered, before.last_round) == (answered, last)
    assert before is not None
    assert before.spans == ((1, 6), (8, 9))


def test_an_evaluation_is_in_the_log_with_what_left():
    said, saved = list[str](), list[RunStatus]()
    job = evaluation()
    lines = RunLines(
        RUN,
        job=job,
        promise=None,
        data="own data",
        listener=said.append,
        total=str,
        save=saved.append,
        clock=VirtualClock(),
        audit=lambda *_: None,
    )
    lines.accept()
    lines.begin()
    task = _task(TaskKind.EVALUATE, 1)
    sums = MetricSums(count=1, loss_sum=0.0, metrics={})
    answer = SiteEvaluation(
        run_id=RUN, round_index=1, site=SITE, evaluation=sums, phases=()
    )
    lines.note(task, answer)
    assert "'small', no training, no differential" in said[0]
    assert said[2].endswith(f"model.npz; sends {', '.join(sent_by(job))}")
    assert "is over: job 'small', no training, 1 evaluation answered" in said[3]
    assert [one.state for one in saved] == ["accepted", "begun", "answered", "is over"]
