"""Logs that are bounded while programs write to them."""

from pathlib import Path

from deploy.aggregator_host import log_files


def test_a_log_begins_anew_while_it_is_written(tmp_path: Path):
    """Its program notices nothing, what it had written stays, and no gap is left."""
    path = tmp_path / "nginx.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"first\n" * 10)
        log_files.bound([tmp_path], most=59)
        log.write(b"second\n")
    assert path.read_bytes() == b"second\n"
    assert (tmp_path / "nginx.log.1").read_bytes() == b"first\n" * 10


def test_a_log_and_one_before_it_are_all_that_there_is(tmp_path: Path):
    """However often it overflows."""
    path = tmp_path / "nginx.log"
    for number in range(5):
        path.write_bytes(b"%d" % number * 10)
        log_files.bound([tmp_path], most=9)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "nginx.log",
        "nginx.log.1",
    ]
    assert (tmp_path / "nginx.log.1").read_bytes() == b"4" * 10
