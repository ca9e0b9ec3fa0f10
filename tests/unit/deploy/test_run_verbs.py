"""Following a run that others write."""

from pathlib import Path

from deploy import run_verbs
from deploy.run_folder import RunFolder


def test_line_of_a_killed_writer_is_not_taken_for_the_next(tmp_path: Path):
    """Its successor cuts the torn line off and goes on in its place."""
    run = RunFolder(tmp_path)
    run.events.write_bytes(b"first\nto")
    over = False
    lines = run_verbs._lines(run, lambda: over)
    assert next(lines) == b"first"
    run.events.write_bytes(b"first\nsecond\nthird\nto")
    assert next(lines) == b"second"
    over = True
    assert list(lines) == [b"third"]
