"""``site.toml``: what is left out is strict, and what is wrong is named."""

from pathlib import Path

import pytest

from clients.privacy.policy_spec import PolicySpec
from deploy.site_host import config as site_file, folder as site_folder
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
    policy = config.file.policy
    assert policy == PolicySpec()
    assert (policy.privacy, policy.secure_aggregation) == ("record", True)
    assert not policy.accept_two_sites
    assert not policy.public_held_out
    assert all(name.startswith("clients.") for name in policy.functions)
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
        (
            "[aggregator]",
            "[policy]\nmax_epsilon = 0.0\n[aggregator]",
            "policy.max_epsi",
        ),
        (
            "[aggregator]",
            "[policy]\nmax_epsilon = nan\n[aggregator]",
            "policy.max_epsi",
        ),
        ("[aggregator]", '[policy]\nprivacy = "some"\n[aggregator]', "policy.privacy"),
        ("[aggregator]", "[policy]\nmin_sites = 1\n[aggregator]", "policy.min_sites"),
        ("[aggregator]", "[policy]\nlevels = [4, 5]\n[aggregator]", "policy.levels"),
        ("[aggregator]", "[policy]\nmax_delta = 1.0\n[aggregator]", "policy.max_delta"),
        (
            "[aggregator]",
            '[compute]\nsharding = "full"\n[aggregator]',
            "compute.sharding",
        ),
        ("[aggregator]", "[flor]\n[aggregator]", "flor"),
        (
            "[aggregator]",
            '[data]\noptions = { file = "FILL IN" }\n[aggregator]',
            "data: still has a 'FILL IN'",
        ),
        ("[aggregator]", '[policy]\nmax_epsilom = "1"\n[aggregator]', "max_epsilom"),
    ],
)
def test_wrong_key_is_named_with_its_file(tmp_path: Path, old: str, new: str, key: str):
    """A policy that is misspelt must not be a policy that is missing."""
    assert old in SMALLEST
    path = write(tmp_path, SMALLEST.replace(old, new))
    with pytest.raises(JobError) as caught:
        site_file.load(path)
    assert key in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


def test_old_name_of_the_policy_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Files from before the table was called [policy] keep their demands."""
    path = write(tmp_path, f"{SMALLEST}[floor]\nmax_rounds = 7\n")
    assert site_file.load(path).file.policy == PolicySpec(max_rounds=7)
    assert caplog.messages == [f"{path}: [floor] is now [policy]: rename the table"]
    write(tmp_path, f"{SMALLEST}[policy]\nmax_rounds = 7\n")
    assert site_file.load(path).file.policy == PolicySpec(max_rounds=7)
    assert len(caplog.messages) == 1


def test_no_levels_may_be_accepted(tmp_path: Path):
    """Unlike rings, of which a sum always has one."""
    path = write(tmp_path, f"{SMALLEST}[policy]\nlevels = []\n")
    assert site_file.load(path).file.policy.levels == ()
    assert PolicySpec().levels == (3, 4, 8, 16, 256)
    path = write(tmp_path, f"{SMALLEST}[policy]\nring_bits = []\n")
    with pytest.raises(JobError, match=r"policy\.ring_bits"):
        site_file.load(path)


def test_functions_that_match_none_are_refused(tmp_path: Path):
    """A line that accepts nothing looks to its author as if it did."""
    path = write(tmp_path, f'{SMALLEST}[policy]\nfunctions = ["a.b:*", "./c.py:d"]\n')
    assert site_file.load(path).file.policy.functions == ("a.b:*", "./c.py:d")
    for wrong in ("./c.py:*", "a.b", "*", "a.b:c*"):
        write(tmp_path, f'{SMALLEST}[policy]\nfunctions = ["a:b", "{wrong}"]\n')
        with pytest.raises(JobError, match=r"policy\.functions") as caught:
            site_file.load(path)
        assert repr(wrong) in str(caught.value)
        assert "./file.py:function" in str(caught.value)


def test_policy_under_both_names_is_refused(tmp_path: Path):
    """Whichever is the stricter one."""
    path = write(tmp_path, f"{SMALLEST}[floor]\n[policy]\n")
    with pytest.raises(JobError, match=r"site\.toml: floor: .*old name of \[pol"):
        site_file.load(path)


SERVE = '\n[serve]\nlisten = "0.0.0.0:8444"\nhosts = ["relay"]\nsites = ["a"]\n'
LINK = '\n[relay]\naddress = "relay:8444"\nauthority = "relay.crt"\n'


def test_relay_and_site_behind_it(tmp_path: Path):
    """By default neither: such a site connects to the aggregator."""
    file = site_file.load(write(tmp_path, SMALLEST)).file
    assert (file.serve, file.relay) == (None, None)
    serve = site_file.load(write(tmp_path, SMALLEST + SERVE)).file.serve
    assert serve is not None
    assert serve.sites == ("a",)
    relay = site_file.load(write(tmp_path, SMALLEST + LINK)).file.relay
    assert relay is not None
    assert relay.address == "relay:8444"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (SERVE + LINK, "relay"),
        (LINK.replace("relay:8444", "relay"), "relay.address"),
        (SERVE.replace("0.0.0.0:8444", "8444"), "serve.listen"),
        (SERVE.replace('"relay"', ""), "serve.hosts"),
        (SERVE.replace('"relay"', '"relay:8444"'), "serve.hosts"),
        (SERVE.replace('"relay"', '"réseau"'), "serve.hosts"),
        (SERVE.replace('"a"', '"A b"'), "serve.sites"),
        (SERVE.replace('"a"', ""), "serve.sites"),
        (SERVE + '[home]\nurl = "s3://bucket/place"\n', "home.url"),
    ],
)
def test_relays_that_cannot_be(tmp_path: Path, text: str, key: str):
    with pytest.raises(JobError, match=rf"site\.toml: {key}: "):
        site_file.load(write(tmp_path, SMALLEST + text))


def test_site_behind_a_relay_needs_two_certificates(tmp_path: Path):
    """Its own, to be admitted, and the authority that it pins."""
    config = site_file.load(write(tmp_path, SMALLEST + LINK))
    assert config.file.relay is not None
    with pytest.raises(JobError, match="enrol this site") as caught:
        site_folder.relay_authority(config, config.file.relay)
    assert caught.value.key == "certificate"
    text = SMALLEST.replace("[agg", 'certificate = "a.crt"\n[agg') + LINK
    config = site_file.load(write(tmp_path, text))
    with pytest.raises(JobError, match=r"copy relay/ca\.crt") as caught:
        site_folder.relay_authority(config, config.file.relay)
    assert caught.value.key == "relay.authority"
    (tmp_path / "relay.crt").write_bytes(b"PEM")
    assert site_folder.relay_authority(config, config.file.relay) == b"PEM"


def test_missing_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The whole path, since commands look for site.toml where they are run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError) as caught:
        site_file.load(Path("site.toml"))
    said = str(caught.value)
    assert f"cannot read {tmp_path / 'site.toml'}: No such file" in said
    assert "name its site.toml (--config FILE" in said
    assert "crossfed enroll`" in said
