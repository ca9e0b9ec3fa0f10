"""Mistakes at the start of an aggregator or a site."""

import importlib.util
from pathlib import Path

import pytest
from support.enrolments import Federation

from cloud_adapters.flower import simulation as flower_simulation
from deploy import audit_log
from deploy.cli import commands as cli
from federation import folder_lock

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

pytestmark = pytest.mark.flower


def told(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_without_nginx_both_commands_say_what_enrolment_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = ["aggregator", "init", str(tmp_path / "fed"), "--no-proxy"]
    assert cli.main([*made, "--listen", "127.0.0.1:9093"]) == 0
    assert "proxy of your own" in capsys.readouterr().err
    invited = ["aggregator", "invite", "a", "--config"]
    assert cli.main([*invited, str(tmp_path / "fed" / "aggregator.toml")]) == 0
    assert "proxy of your own" in capsys.readouterr().err
    path = tmp_path / "fed" / audit_log.FILE
    first, _ = audit_log.read(path).entries
    assert (first.action, first.who) == ("aggregator.init", audit_log.operator())
    assert cli.main(["audit-log", str(path)]) == 0
    assert "\n2 entries, digest" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["identity.pem", "node.pem", "site.pem"])
def test_key_that_is_open_to_others_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    """Neither of the three, and before anybody is called."""
    folder = Federation(folder=tmp_path).site("site-a").folder
    (folder / name).chmod(0o644)
    assert cli.main(["site", "up", "--config", str(folder / "site.toml")]) == 1
    assert f"{folder / name} has mode 0644: others may read" in told(capsys)


def test_second_agent_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It would contradict the first."""
    folder = Federation(folder=tmp_path).site("site-a").folder
    with folder_lock.hold(folder / "agent.lock", "the first"):
        assert cli.main(["site", "up", "--config", str(folder / "site.toml")]) == 1
    assert f"relay is running in {folder}: stop it" in told(capsys)
