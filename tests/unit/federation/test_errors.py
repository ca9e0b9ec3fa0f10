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
