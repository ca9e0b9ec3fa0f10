"""Which errors may pass without anybody changing a job or a setting."""

import errno

import pytest

from federation.errors import (
    CorruptObject,
    JobError,
    KeyRefused,
    SiteError,
    StoreError,
    StoreForbidden,
    StoreThrottled,
    StoreUnavailable,
    is_passing,
)


def test_no_folder_of_a_site_leaves_it():
    """Nor what a user's code says in an error of the system."""
    full = StoreUnavailable("cannot write /data/Hospital A/site/x: no space")
    full.__cause__ = OSError(errno.ENOSPC, "record 17 of J. Doe", "/data/Hospital A/x")
    assert full.outside == (
        "the disk of the site cannot be used: No space left on device"
    )
    gone = CorruptObject("/srv/a.b/memory/x.json is damaged; see '/home/me/y z'")
    assert gone.outside == "x.json is damaged; see 'y z'"
    told = "at https://a.example/b/c, s3://bucket/key and 1 / (10 n) or docs/howto/a.md"
    assert SiteError(told).outside == told


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (StoreUnavailable("unreachable"), True),
        (StoreThrottled("too many", temporary=True), True),
        (StoreError("once more", temporary=True), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (StoreForbidden("no permission"), False),
        (KeyRefused("disabled"), False),
        (CorruptObject("damaged"), False),
        (JobError("unknown", key="rounds"), False),
        (OSError(errno.ENOENT, "No such file"), False),
    ],
)
def test_what_passes_does_so_below_other_errors(error: Exception, *, passes: bool):
    """A site wraps what its data source raised."""
    above = SiteError("the data cannot be loaded")
    above.__cause__ = error
    assert is_passing(error) is passes
    assert is_passing(above) is passes
