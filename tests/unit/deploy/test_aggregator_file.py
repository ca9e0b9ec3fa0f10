"""``aggregator.toml``: safe by default, and open to nobody without a proxy."""

from pathlib import Path

import pytest

from deploy import aggregator_file
from federation.errors import JobError


def write(folder: Path, text: str) -> Path:
    path = folder / "aggregator.toml"
    path.write_text(text)
    return path


def test_empty_file_is_enough(tmp_path: Path):
    """The proxy stands before everything, and ports are found."""
    config = aggregator_file.load(write(tmp_path, ""))
    assert config.file.proxy
    assert config.file.superlink_port == config.file.service_port == 0
    assert config.folder == tmp_path
    assert config.runs == tmp_path / "runs"
    assert config.flower == tmp_path / "flower"
    assert config.logs == tmp_path / "logs"


@pytest.mark.parametrize("listen", ["127.0.0.1:9", "[::1]:9", "localhost:9"])
def test_loopback_needs_no_proxy(tmp_path: Path, listen: str):
    """To try it out on one machine."""
    text = f'proxy = false\nlisten = "{listen}"\n'
    assert not aggregator_file.load(write(tmp_path, text)).file.proxy


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("proxy = false", "listen"),
        ('proxy = false\nlisten = "10.0.0.1:9"', "listen"),
        ('proxy = false\nlisten = "127.0.0.1.example.org:9"', "listen"),
        ('listen = "8443"', "listen"),
        ('listen = "0.0.0.0:70000"', "listen"),
        ("hosts = []", "hosts"),
        ('hosts = "localhost"', "hosts"),
        ("superlink_port = -1", "superlink_port"),
        ("service_port = 65536", "service_port"),
        ("connect_seconds = 0", "connect_seconds"),
        ("connect_seconds = inf", "connect_seconds"),
        ("conect_seconds = 5", "conect_seconds"),
    ],
)
def test_wrong_key_is_named_with_its_file(tmp_path: Path, text: str, key: str):
    """Flower's other interfaces ask nobody for a key: see the first three."""
    path = write(tmp_path, text)
    with pytest.raises(JobError) as caught:
        aggregator_file.load(path)
    assert key in str(caught.value)
    assert str(caught.value).count(str(path)) == 1
