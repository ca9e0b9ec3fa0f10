"""Which key service a name in a job opens."""

from pathlib import Path

import pytest

from cloud_adapters.keys.key_file import add_key
from cloud_adapters.keys.names import open_keys
from federation.errors import JobError

ARN = "arn:aws:kms:eu-west-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"


def test_names_open_their_services(tmp_path: Path):
    """Each calls itself as the job does; no service is asked."""
    add_key(tmp_path / "keys.toml")
    for name in (f"file:{tmp_path}/keys.toml", f"aws-kms:{ARN}", f"gcp-kms:{KEY}"):
        keys = open_keys(name, endpoint="http://127.0.0.1:9")
        assert keys.name == name
        keys.close()


@pytest.mark.parametrize(
    "name", ["", "file", "file:", ":x", "vault:x", "aws-kms:key", "gcp-kms:key"]
)
def test_other_names_are_refused(name: str):
    """With the key of the job that is to be corrected."""
    with pytest.raises(JobError) as caught:
        open_keys(name)
    assert caught.value.key == "storage.encryption.key"
