"""What the aggregator's host says of a SuperLink that does not answer."""

import importlib.util
from pathlib import Path

import pytest

from cloud_adapters.flower import simulation as flower_simulation

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

import httpx  # noqa: E402

from cloud_adapters.flower.facts import SuperLinkUnavailable  # noqa: E402
from cloud_adapters.superlink import control  # noqa: E402
from federation.clock import SystemClock  # noqa: E402
from privacy.membership.certificates import Authority  # noqa: E402

pytestmark = pytest.mark.flower

REQUEST = httpx.Request("POST", "https://127.0.0.1:1/v1/control/list-nodes")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (httpx.ReadTimeout("timed out"), "127.0.0.1:1 did not answer: timed out; "),
        (
            httpx.HTTPStatusError(
                "no",
                request=REQUEST,
                response=httpx.Response(403, text="no secret", request=REQUEST),
            ),
            "127.0.0.1:1 rejected a request: HTTP 403: no secret; ",
        ),
    ],
)
def test_silence_is_no_refusal(error: httpx.HTTPError, text: str, tmp_path: Path):
    """A frozen SuperLink did not refuse anything: its operator would look for why."""
    Authority.create("test", clock=SystemClock()).save(tmp_path)
    authority = (tmp_path / "ca.crt").read_bytes()
    with (
        control.FlowerControl("127.0.0.1:1", authority, b"secret") as asked,
        pytest.raises(SuperLinkUnavailable, match=text),
        asked._asking(),
    ):
        raise error
