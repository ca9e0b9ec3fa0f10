"""Loads and predicted times of sites, from measured speeds."""

import dataclasses

import numpy as np
import pytest
from support import event_samples
from support.small_jobs import small_job

from clients.data.datasets import Examples, as_dataset
from clients.data.partition import partition
from deploy.tools.balance import balance, measured_speeds, proportional
from federation.errors import SiteError
from federation.events import Event, SiteAnswered
from federation.job.spec import JobSpec, PartitionSpec
from federation.messages import Phase
from monitoring.views.run_fold import fold

LOCAL_STEPS = small_job(training={"local_steps": 10, "batch_size": 16, "accumulate": 2})
LOCAL_EPOCHS = small_job(training={"local_epochs": 3, "batch_size": 16})


def test_a_fast_site_waits_for_a_slow_one():
    """Three times the work for the same speed takes three times as long."""
    found = balance({"a": 300, "b": 100}, {"a": 10.0, "b": 10.0})
    assert [site.load for site in found.sites] == [1.5, 0.5]
    assert [site.seconds for site in found.sites] == [30.0, 10.0]
    assert found.seconds == 30.0
    assert found.idle == pytest.approx(1 / 3)


def test_predicted_shares_are_those_of_the_partition():
    """The job that follows the advice deals out what was predicted."""
    data = as_dataset(Examples(inputs=np.zeros((101, 1))), name="data")
    speeds = {"a": 3.7, "b": 1.1, "c": 9.2}
    parts = partition(
        data,
        data,
        PartitionSpec(kind="proportional", speeds=tuple(speeds.values())),
        site_names=list(speeds),
        rng=np.random.default_rng(1),
    )
    dealt = {site: len(part) for site, (part, _) in zip(speeds, parts, strict=True)}
    assert proportional(101, speeds) == dealt


def test_a_site_without_a_speed():
    """It is named."""
    with pytest.raises(SiteError, match="speed of site 'b' was not measured"):
        balance({"a": 1, "b": 1}, {"a": 1.0})


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_speeds(speed: float):
    """Each is a mistake of the caller."""
    with pytest.raises(ValueError, match="not possible"):
        balance({"a": 1}, {"a": speed})
    with pytest.raises(ValueError, match="no example"):
        balance({"a": 0}, {"a": 1.0})


def with_times(events: list[Event], seconds: dict[str, list[float]]) -> list[Event]:
    """Give each site its seconds of training, round by round, and ten steps."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, SiteAnswered):
            took = seconds[event.site][event.round_index - 1]
            phases = (
                Phase(name="evaluate", start_seconds=0.0, seconds=7.0),
                Phase(name="train", start_seconds=7.0, seconds=took),
            )
            found.append(dataclasses.replace(event, phases=phases, num_steps=10))
        else:
            found.append(event)
    return found


@pytest.mark.parametrize("job", [LOCAL_STEPS, LOCAL_EPOCHS])
def test_speeds_are_those_of_the_median_round(job: JobSpec):
    """The first round of a process is slow, and evaluation is no training."""
    aws, gcp = event_samples.TWO_SITES
    view = fold(
        with_times(event_samples.two_sites(rounds=3), {aws: [50, 2, 4], gcp: [9, 8, 8]})
    )
    assert view.data is not None
    examples = [share.train_examples for share in view.data.shares]
    work = [3 * n for n in examples] if job is LOCAL_EPOCHS else [320, 320]
    assert measured_speeds(view, job) == {aws: work[0] / 4, gcp: work[1] / 8}


def test_a_site_that_never_answered():
    """It is named, and so is what to do."""
    _, gcp = event_samples.TWO_SITES
    events = [
        event
        for event in event_samples.two_sites(rounds=3)
        if not (isinstance(event, SiteAnswered) and event.site == gcp)
    ]
    with pytest.raises(SiteError, match=rf"finished training of site '{gcp}'.*run"):
        measured_speeds(fold(events), LOCAL_STEPS)


def test_secure_aggregation_hides_speeds():
    """The message says how to measure."""
    with pytest.raises(SiteError, match=r"secure_aggregation\.enabled=false"):
        measured_speeds(fold(event_samples.secure()), LOCAL_STEPS)
