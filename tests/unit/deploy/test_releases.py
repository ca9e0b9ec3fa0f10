"""Which of two releases is the older one."""

import pytest

from privacy.membership import releases


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ("0.9", "0.10.1", "upgrade the site (pip"),
        ("0.10", "0.9", "upgrade the aggregator (pip"),
        ("0.10", "0.10", "not the same code:"),
        ("0.10", "0.10rc1", "install the same one"),
        ("0.10", "x" * 99, f"the release '{'x' * 20}'"),
        ("0.10", "99'; sh x #", "names the release"),
        ("0.10", "99\ncrossfed: x", "names the release"),
    ],
)
def test_older_side_is_upgraded(here: str, there: str, expected: str):
    """A release that came from elsewhere is cut short."""
    told = releases.advice(site="left", here=here, there=there)
    assert "site 'left'" in told
    assert expected in told
    assert ("pip" in told) is ("pip" in expected)
    assert "\n" not in told
