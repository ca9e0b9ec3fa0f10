"""What the proxy's configuration says; ``tests/integration/test_proxy.py`` runs it."""

from pathlib import Path

import pytest

from cloud_adapters.nginx import config as proxy
from cloud_adapters.nginx.config import ProxySettings, config_text
from federation.errors import JobError


def _settings(**changes: object) -> ProxySettings:
    values = {
        "listen": "0.0.0.0:8443",
        "superlink_port": 1234,
        "service_port": 5678,
        "folder": Path("/srv/aggregator"),
        "work": Path("/srv/aggregator/proxy"),
        **changes,
    }
    return ProxySettings(**values)  # type: ignore[arg-type]


def test_address_of_version_6_is_in_brackets():
    """Nginx would take its last group for the port."""
    assert "listen [::]:8443 ssl;" in config_text(_settings(listen="[::]:8443"))


def test_listens_in_one_place_alone():
    """And only with TLS 1.3; who sends no request is let go after 10 s."""
    text = config_text(_settings())

    assert text.count("listen ") == 1
    assert "client_header_timeout 10s;" in text
    assert "ssl_protocols TLSv1.3;" in text
    assert "listen 0.0.0.0:8443 ssl;" in text


@pytest.mark.parametrize("sign", ['"', "'", ";", "{", "}", "$", "\\", "\n"])
def test_path_with_a_sign_of_nginx_is_refused(sign: str):
    """It would end the directive, or be a variable."""
    with pytest.raises(JobError, match="special to nginx"):
        config_text(_settings(work=Path(f"/srv/a{sign}b")))


@pytest.mark.parametrize("listen", ["8443", "host:0", "host:99999", "a;b:1"])
def test_bad_address_is_refused(listen: str):
    """Nginx itself would say so with a line number of a file that nobody wrote."""
    with pytest.raises(JobError):
        config_text(_settings(listen=listen))


def test_missing_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """In the words of the shell that installs it."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(proxy, "_PROGRAMS", ())

    with pytest.raises(proxy.ProxyFailed, match="apt-get install nginx-light"):
        proxy.find_program()
