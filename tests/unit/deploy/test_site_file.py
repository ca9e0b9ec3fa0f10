"""``site.toml``: what is left out is strict, and what is wrong is named."""

from pathlib import Path

import pytest

from clients.privacy.floor_spec import FloorSpec
from deploy.site_host import config as site_file
from federation.errors import JobError

SMALLEST = """
name = "hospital-a"

[aggregator]
address = "fed.example.org:8443"
authority = "ca.crt"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "site.toml"
    path.write_text(text)
    return path


def test_smallest_file_is_a_strict_site(tmp_path: Path):
    """Record-level privacy, secure aggregation, and no function of an operator's."""
    config = site_file.load(write(tmp_path, SMALLEST))
    floor = config.file.floor
    assert floor == FloorSpec()
    assert (floor.privacy, floor.secure_aggregation) == ("record", True)
    assert not floor.accept_two_sites
    assert not floor.public_held_out
    assert all(name.startswith("clients.") for name in floor.functions)
    assert config.file.data.source == ""


def test_paths_are_relative_to_the_file(tmp_path: Path):
    """Wherever the agent is started."""
    config = site_file.load(write(tmp_path, SMALLEST))
    assert config.folder == tmp_path
    assert config.identity == tmp_path / "identity.pem"
    assert config.node_key == tmp_path / "node.pem"
    assert config.roster == tmp_path / "roster.toml"
    assert config.authority == tmp_path / "ca.crt"
    assert config.certificate is None


def test_paths_follow_the_folder(tmp_path: Path):
    """And a path from the root stays what it is."""
    text = SMALLEST.replace(
        "[agg",
        'folder = "state"\nidentity = "/keys/a.pem"\ncertificate = "a.crt"\n[agg',
    )
    config = site_file.load(write(tmp_path, text))
    assert config.folder == tmp_path / "state"
    assert config.roster == tmp_path / "state" / "roster.toml"
    assert config.identity == Path("/keys/a.pem")
    assert config.certificate == tmp_path / "state" / "a.crt"


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"hospital-a"', '"Hospital A"', "name"),
        ('"hospital-a"', '"../a"', "name"),
        ('"fed.example.org:8443"', '"fed.example.org"', "aggregator.address"),
        ('"fed.example.org:8443"', '":8443"', "aggregator.address"),
        ('"fed.example.org:8443"', '"fed.example.org:0"', "aggregator.address"),
        ('"fed.example.org:8443"', '"fed.example.org:65536"', "aggregator.address"),
        ('"fed.example.org:8443"', '"https://fed.example.org"', "aggregator.address"),
        ('"fed.example.org:8443"', "8443", "aggregator.address"),
        ('authority = "ca.crt"', "", "aggregator.authority"),
        ("[aggregator]", "[floor]\nmax_epsilon = 0.0\n[aggregator]", "floor.max_epsi"),
        ("[aggregator]", "[floor]\nmax_epsilon = nan\n[aggregator]", "floor.max_epsi"),
        ("[aggregator]", '[floor]\nprivacy = "some"\n[aggregator]', "floor.privacy"),
        ("[aggregator]", "[floor]\nmin_sites = 1\n[aggregator]", "floor.min_sites"),
        ("[aggregator]", "[floor]\nmax_delta = 1.0\n[aggregator]", "floor.max_delta"),
        (
            "[aggregator]",
            '[compute]\nsharding = "full"\n[aggregator]',
            "compute.sharding",
        ),
        ("[aggregator]", "[flor]\n[aggregator]", "flor"),
        ("[aggregator]", '[floor]\nmax_epsilom = "1"\n[aggregator]', "max_epsilom"),
    ],
)
def test_wrong_key_is_named_with_its_file(tmp_path: Path, old: str, new: str, key: str):
    """A floor that is misspelt must not be a floor that is missing."""
    assert old in SMALLEST
    path = write(tmp_path, SMALLEST.replace(old, new))
    with pytest.raises(JobError) as caught:
        site_file.load(path)
    assert key in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


def test_missing_file_and_no_toml_are_told(tmp_path: Path):
    """With the path."""
    with pytest.raises(JobError, match=r"none\.toml"):
        site_file.load(tmp_path / "none.toml")
    with pytest.raises(JobError, match=r"site\.toml"):
        site_file.load(write(tmp_path, "name = "))
