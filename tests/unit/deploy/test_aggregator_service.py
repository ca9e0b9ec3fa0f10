"""The aggregator's service, while its SuperLink does not answer."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from cloud_adapters.flower import simulation as flower_simulation
from deploy.aggregator_host.config import AggregatorConfig, AggregatorFile
from federation.clock import VirtualClock
from federation.errors import FederationError

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from deploy.aggregator_host.service import (  # noqa: E402
    START_SECONDS,
    AggregatorService,
)

pytestmark = pytest.mark.flower


class Ends:
    """Lets time pass, and is set at its end."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def is_set(self) -> bool:
        return self.clock.monotonic() >= self.seconds

    def wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)


class Silent:
    """A SuperLink whose certificate this machine does not accept."""

    def nodes(self) -> None:
        raise FederationError("its certificate is not yet valid")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.9 * START_SECONDS, 0), (3 * START_SECONDS, 1)]
)
def test_a_superlink_that_never_answers_is_reported_once(
    tmp_path: Path, seconds: float, said: int
):
    """Its start takes seconds, and a clock that is wrong would last for ever."""
    told: list[str] = []
    clock = VirtualClock()
    file = AggregatorFile(listen="h:1", hosts=("h",))
    ends: Any = Ends(clock, seconds)
    service = AggregatorService(
        config=AggregatorConfig(file=file, folder=tmp_path),
        config_path=tmp_path,
        clock=clock,
        listener=told.append,
        stopped=ends,
    )
    (tmp_path / "flower").mkdir()
    silent: Any = Silent()
    service._serve(silent)
    assert [line for line in told if "certificate" in line] == [
        "its certificate is not yet valid"
    ] * said
