"""What podman writes when it fails."""

from cloud_adapters.compute.containers import words_of

LOG = (
    'time="2026-11-27T06:22:56Z" level=error msg="unable to get systemd connection '
    'to add healthchecks: dial unix /run/systemd/private: connect: no such file"'
)


def test_the_error_is_shown_and_not_what_podman_logs():
    """Its log comes first, on every host without systemd, and fills the message."""
    assert words_of(f"{LOG}\n{LOG}\n\ncrossfed: no route\n") == "crossfed: no route"
    assert words_of("Error: no such image\n") == "Error: no such image"
    assert words_of(f"{LOG}\n") == LOG
    assert words_of("\n") == ""


def test_the_end_of_a_long_error_is_shown():
    lines = [f"line {number}" for number in range(100)]
    assert words_of("\n".join(lines)) == "line 96\nline 97\nline 98\nline 99"
