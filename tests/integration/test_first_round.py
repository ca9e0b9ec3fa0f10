"""How soon ``crossfed up`` of local sites has a first round behind it."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from support.deployment import CLOCK, CROSSFED, crossfed, wait_for
from support.programs import needs

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "local.toml"
# What a person is promised who tries the example, from nothing.
MOST_SECONDS = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # It starts what tests usually fork, and measures.
    pytest.mark.deploy,
    needs("nginx"),
]


def test_first_round_is_over_within_a_minute(tmp_path: Path):
    """Keys, certificates, enrolment and imports included, each process a real one."""
    text = EXAMPLE.read_text()
    given = tomllib.loads(text)
    job = (EXAMPLE.parent / given["job"]).resolve()
    file = tmp_path / EXAMPLE.name
    file.write_text(
        text.replace(given["job"], str(job)).replace(
            given["folder"], str(tmp_path / "deployment")
        )
    )
    begin = CLOCK.monotonic()
    up = subprocess.Popen(
        [*CROSSFED, "up", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        runs = tmp_path / "deployment" / "aggregator" / "runs"

        def is_over() -> bool:
            assert up.poll() in {None, 0}, up.communicate()
            events = (path.read_text() for path in runs.glob("*/*/events.jsonl"))
            return any('"RoundFinished"' in text for text in events)

        wait_for(is_over, "the first round ends")
        took = CLOCK.monotonic() - begin
        assert took < MOST_SECONDS
    finally:
        up.kill()
        up.communicate()
        crossfed("down", str(file))
