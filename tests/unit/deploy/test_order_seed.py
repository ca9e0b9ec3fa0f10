"""The order of a deployed site's examples under secure aggregation."""

from pathlib import Path

from support.agents import site_config
from support.secure_runs import in_the_clear, secure_job

from deploy.site_host.run import order_seed

SECURE = secure_job(5)
PROPOSAL = b"a proposal with a fresh nonce"


def test_order_is_the_same_after_a_restart(tmp_path: Path):
    """A site that takes a run up again continues in the order that it had."""
    found = [order_seed(site_config(tmp_path, "a"), SECURE, PROPOSAL) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0] is not None
    assert 0 <= found[0] < 1 << 256


def test_order_is_of_one_site_and_one_proposal(tmp_path: Path):
    """No two have the same, and nothing that the aggregator knows tells it."""
    one, other = (site_config(tmp_path / name, name) for name in ("a", "b"))
    seeds = {
        order_seed(one, SECURE, PROPOSAL),
        order_seed(other, SECURE, PROPOSAL),
        order_seed(one, SECURE, PROPOSAL + b"!"),
    }
    assert len(seeds) == 3


def test_secret_is_in_a_file_of_its_owner_alone(tmp_path: Path):
    """In the site's folder, beside no run."""
    order_seed(site_config(tmp_path, "a"), SECURE, PROPOSAL)
    (path,) = (tmp_path / "memory").glob("*.json")
    assert path.stat().st_mode & 0o077 == 0


def test_in_the_clear_the_order_is_the_jobs(tmp_path: Path):
    """Updates may be seen there, and runs repeat themselves bit for bit."""
    config = site_config(tmp_path, "a")
    assert order_seed(config, in_the_clear(SECURE), PROPOSAL) is None
    assert not (tmp_path / "memory").exists()
