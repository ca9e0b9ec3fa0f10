"""``aggregator.toml``: safe by default, and open to nobody without a proxy."""

from pathlib import Path

import pytest

from deploy.aggregator_host import config as aggregator_file
from federation.errors import FederationError, JobError


def write(folder: Path, text: str) -> Path:
    path = folder / "aggregator.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("host", ["a", "fed.example.org", "10.0.0.1", "::1"])
def test_host_is_a_name_or_an_address(tmp_path: Path, host: str):
    """What a certificate can be made for."""
    found = aggregator_file.load(write(tmp_path, f'hosts = ["{host}"]'))
    assert found.file.hosts == (host,)


@pytest.mark.parametrize("listen", ["127.0.0.1:9", "[::1]:9", "localhost:9"])
def test_loopback_needs_no_proxy(tmp_path: Path, listen: str):
    """To try it out on one machine."""
    text = f'proxy = false\nlisten = "{listen}"\n'
    assert not aggregator_file.load(write(tmp_path, text)).file.proxy


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("proxy = false", "listen"),
        ('hosts = ["bad host"]', "hosts"),
        ('hosts = ["https://fed.example.org"]', "hosts"),
        ('hosts = ["fed.example.org:8443"]', "hosts"),
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
        ("limits.answer_mib = 79", "limits.answer_mib"),
        ("exchange.threshold_mb = 90", "limits.answer_mib"),
        ("limits.site_mib = 95", "limits.site_mib"),
        ("limits.run_mib = 383", "limits.run_mib"),
        ("limits.reserve_mib = 64", "limits.reserve_mib"),
        ('listen = "0.0.0.0:8443"\nmonitor.port = 8443', "monitor.port"),
        ("service_port = 8444\nmonitor.port = 8444", "monitor.port"),
        ('monitor.traces = "127.0.0.1:4318"', "monitor.traces"),
        ('monitor.traces = "grpc://127.0.0.1:4317"', "monitor.traces"),
        ('alerts = [{ webhook = "hooks.example.org/x" }]', "alerts[0].webhook"),
    ],
)
def test_wrong_key_is_named_with_its_file(tmp_path: Path, text: str, key: str):
    """Flower's other interfaces ask nobody for a key: see the first three."""
    path = write(tmp_path, text)
    with pytest.raises(JobError) as caught:
        aggregator_file.load(path)
    assert key in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


@pytest.mark.parametrize("content", ["", "x", "0", "65536", "\xff"])
def test_damaged_file_of_a_port_is_named(tmp_path: Path, content: str):
    """The service and a revocation say the same."""
    config = aggregator_file.load(write(tmp_path, ""))
    config.port_file.parent.mkdir()
    config.port_file.write_text("9092\n")
    assert config.superlink_port() == 9092
    config.port_file.write_text(content, encoding="latin-1")
    with pytest.raises(FederationError, match=r"port holds no port number: remove it"):
        config.superlink_port()
