"""What a site knows of itself as OpenMetrics, for a Prometheus of its operator's.

The number of time series is bounded: ``MAX_RUNS`` runs, the newest, and datasets.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deploy.site_host import machine_use
from deploy.site_host.config import SiteConfig
from deploy.site_host.machine_use import Sample
from deploy.site_host.run_status import RunStatus, SiteStatus, status

MAX_RUNS = 20

# What each family means, by its name after ``crossfed_agent_``.
_TEXTS = {
    "last_contact_timestamp_seconds": "When the aggregator or the relay answered last.",
    "certificate_end_timestamp_seconds": "When the site's certificate ends.",
    "dataset_epsilon": "What all runs on a dataset have spent together.",
    "dataset_epsilon_left": "What is left of policy.total_epsilon.",
    "run_status": "1 for how a run stands here: accepted, begun, answered, its end.",
    "run_rounds": "Rounds of the job.",
    "run_rounds_answered": "Rounds that this site has answered.",
    "run_noted_timestamp_seconds": "When the site heard of the run last.",
    "run_bytes_total": "Bytes of tasks and answers.",
    "run_work_seconds_total": "Time that the site was at work on tasks.",
    "run_epsilon": "Epsilon spent on training records.",
    "run_epsilon_left": "What is left of the epsilon that the site promised.",
}


class SiteCollector(Collector):
    """Collects the metrics of a site whenever it is asked."""

    def __init__(self, config: SiteConfig) -> None:
        """Take the operator's ``site.toml``; nothing is read yet."""
        self._config = config

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics; see ``prometheus_client``."""
        found = dict[str, CounterMetricFamily | GaugeMetricFamily]()
        for name, labels, value in _samples(status(self._config, MAX_RUNS)):
            if name not in found:
                text = _TEXTS.get(name.removeprefix("crossfed_agent_"), name)
                is_counter = name.endswith("_total")
                kind = CounterMetricFamily if is_counter else GaugeMetricFamily
                found[name] = kind(name, text, labels=[*labels])
            found[name].add_metric([*labels.values()], value)
        yield from found.values()


def _samples(site: SiteStatus) -> Iterator[Sample]:
    if site.use is not None:
        yield from machine_use.samples(site.use, site.grams_per_kwh)
    named = [*_of_site(site)]
    named += [sample for run in site.runs for sample in _of_run(run)]
    for name, labels, value in named:
        if value is not None:
            yield f"crossfed_agent_{name}", labels, value


_Found = Iterator[tuple[str, dict[str, str], float | None]]


def _of_site(site: SiteStatus) -> _Found:
    yield "last_contact_timestamp_seconds", {}, site.last_contact
    yield "certificate_end_timestamp_seconds", {}, site.certificate_ends
    for one in site.datasets[-MAX_RUNS:]:
        labels = {"dataset": one.name}
        yield "dataset_epsilon", labels, one.epsilon
        yield "dataset_epsilon_left", labels, _left(one.epsilon_cap, one.epsilon)


def _of_run(run: RunStatus) -> _Found:
    labels = {"run": run.run_id, "job": run.job}
    yield "run_status", {**labels, "status": run.state}, 1
    yield "run_rounds", labels, run.rounds
    yield "run_rounds_answered", labels, run.answered
    yield "run_noted_timestamp_seconds", labels, run.at
    yield "run_bytes_total", {**labels, "direction": "down"}, run.bytes_down
    yield "run_bytes_total", {**labels, "direction": "up"}, run.bytes_up
    yield "run_work_seconds_total", labels, run.seconds
    if run.epsilon_cap is not None:
        spent = run.epsilon or 0.0
        yield "run_epsilon", labels, spent
        yield "run_epsilon_left", labels, _left(run.epsilon_cap, spent)


def _left(cap: float | None, spent: float) -> float | None:
    return None if cap is None else max(0.0, cap - spent)
