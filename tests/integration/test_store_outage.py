"""Stores and key services that are gone for a while, by a real clock.

Two minutes are too long for a test: deadlines and outages are those of the product on a
scale of 1 to 40. Outages by a clock that only tests move last as long as real ones:
``test_bucket_faults.py``, ``test_retry.py``.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gate import Gate, gate
from support.small_jobs import small_job
from support.without_report import simulate

from cloud_adapters.storage.retry import LEAST_SECONDS, Retry
from federation.errors import ObjectExists, StoreUnavailable
from federation.events import CheckpointSaved, Event

pytestmark = pytest.mark.slow

SCALE = 40
SCALED = Retry(base_seconds=0.2 / SCALE, cap_seconds=10 / SCALE, deadline_seconds=3.0)
OUTAGE_SECONDS = 90 / SCALE


@dataclasses.dataclass(frozen=True)
class Far:
    """A service behind a gate.

    Attributes:
        gate: The way to it.
        verb: Something that is asked of it.
    """

    gate: Gate
    verb: Callable[[], object]


@pytest.fixture
def s3_far(s3_server: Any) -> Iterator[Far]:
    from support.s3_server import client  # noqa: PLC0415 (slow to import)

    with gate(s3_server.url) as way:
        store = s3_server.store(client=client(way.url), retry=SCALED)
        yield Far(way, lambda: store.put("key", [b"content"], if_absent=True))


@pytest.fixture
def gcs_far(gcs_server: Any) -> Iterator[Far]:
    from support import gcs_stores  # noqa: PLC0415 (slow to import)

    with gate(gcs_server.url) as way:
        store = gcs_stores.store(gcs_server, endpoint=way.url, retry=SCALED)
        yield Far(way, lambda: store.put("key", [b"content"], if_absent=True))
        store.close()


@pytest.fixture
def aws_far(s3_server: Any) -> Iterator[Far]:
    from support.key_services import kms_client  # noqa: PLC0415 (slow to import)
    from support.s3_server import client  # noqa: PLC0415

    from cloud_adapters.keys.aws_kms import AwsKms  # noqa: PLC0415

    arn = kms_client(s3_server.url).create_key()["KeyMetadata"]["Arn"]
    with gate(s3_server.url) as way:
        keys = AwsKms(arn, client=client(way.url, service="kms"), retry=SCALED)
        yield Far(way, lambda: keys.generate({"key": "a"}))


@pytest.fixture
def gcp_far(kms_server: Any) -> Iterator[Far]:
    from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415

    from cloud_adapters.keys.gcp_kms import GcpKms  # noqa: PLC0415

    with gate(kms_server.url) as way:
        keys = GcpKms(
            kms_server.add_key(),
            endpoint=way.url,
            credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
            retry=SCALED,
        )
        yield Far(way, lambda: keys.generate({"key": "a"}))
        keys.close()


@pytest.fixture
def together(
    s3_far: Far, gcs_far: Far, aws_far: Far, gcp_far: Far
) -> Iterator[Callable[[Callable[[Far], None]], None]]:
    """Does the same with all of them at once: it is waiting, for the most part."""
    services = [s3_far, gcs_far, aws_far, gcp_far]

    def do(act: Callable[[Far], None]) -> None:
        for done in [pool.submit(act, far) for far in services]:
            done.result()

    with ThreadPoolExecutor(len(services)) as pool:
        yield do


def test_refused_connections_are_outlasted(
    together: Callable[[Callable[[Far], None]], None],
):
    """As long as the outage is shorter than the deadline."""

    def outlast(far: Far) -> None:
        far.gate.close()
        begin = time.monotonic()
        opening = threading.Timer(OUTAGE_SECONDS, far.gate.open)
        opening.start()
        far.verb()
        assert time.monotonic() - begin >= OUTAGE_SECONDS
        opening.join()

    together(outlast)


def test_an_outage_without_an_end_is_told_at_the_deadline(
    together: Callable[[Callable[[Far], None]], None],
):
    """Neither long before it nor long after it."""

    def end(far: Far) -> None:
        far.gate.close()
        begin = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"network.*tried \d+ times in 3 s"):
            far.verb()
        took = time.monotonic() - begin
        assert SCALED.deadline_seconds <= took
        assert took < SCALED.deadline_seconds + LEAST_SECONDS

    together(end)


def test_what_a_person_must_mend_is_told_at_once(gcs_far: Far, s3_far: Far):
    """No waiting helps where the service has refused."""
    for far in (gcs_far, s3_far):
        far.verb()
        begin = time.monotonic()
        with pytest.raises(ObjectExists):
            far.verb()
        assert time.monotonic() - begin < SCALED.deadline_seconds / 2


def test_an_attempt_that_hangs_ends_with_its_call(gcs_server: Any):
    """A server that takes connections and never answers holds nobody for long."""
    import socket  # noqa: PLC0415

    from support import gcs_stores  # noqa: PLC0415 (slow to import)

    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = gcs_stores.store(gcs_server, endpoint=url, retry=SCALED)
        begin = time.monotonic()
        with pytest.raises(StoreUnavailable, match="network"):
            store.stat("key")
        assert time.monotonic() - begin < SCALED.deadline_seconds + 2 * LEAST_SECONDS
        store.close()


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_server_restarts_during_training(
    bucket: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Eight seconds without the store: the run waits, and its model is the same.

    With the product's own deadline, which is the same for all services. Waits that
    double six times and end there are over after three seconds on average.
    """
    del monkeypatch  # ``bucket`` has set credentials with it.
    tables = {"num_sites": 2, "rounds": 3, "storage": bucket}
    with gate(bucket["endpoint"]) as way:
        openings: list[threading.Timer] = []

        def restart(event: Event) -> None:
            if isinstance(event, CheckpointSaved) and not openings:
                way.close()
                openings.append(threading.Timer(8.0, way.open))
                openings[0].start()

        job = small_job(**tables | {"storage": bucket | {"endpoint": way.url}})
        done = simulate(job, folder=tmp_path / "run", listeners=[restart])
        openings[0].join()
    assert done.rounds_completed == 3
    whole = simulate(small_job(**tables | {"storage": {}}))
    for name, array in whole.weights.items():
        np.testing.assert_array_equal(array, done.weights[name])
