"""The code that computes from a site's data, as one hash that all sites agree on."""

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# What a site computes from its data and what it lets out. `deploy.site_host` puts its
# parts together: which noise, which policy, which memory of earlier sums.
_CODE = ("federation", "privacy", "clients", "deploy.site_host")


@cache
def code_hash() -> bytes:
    """SHA-256 of the code that computes from a site's data."""
    digest = hashlib.sha256(b"crossfed/code")
    for package in _CODE:
        spec = find_spec(package)
        folders = (spec.submodule_search_locations or []) if spec else []
        for folder in folders:
            for path in sorted(Path(folder).rglob("*.py")):
                inside = path.relative_to(folder).as_posix()
                name = f"{package.replace('.', '/')}/{inside}"
                digest.update(hashlib.sha256(name.encode()).digest())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()
