"""The coarse public grid on which numbers of examples and records leave a site.

A number that a site reports exactly says whether one record is there or not, once for
all runs. On the grid almost all neighbouring numbers are the same.
"""

_GRID_BITS = 3  # Significant ones: 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 and so on.


def coarse(count: int) -> int:
    """Round a number up to one with three significant bits, by less than a quarter.

    Args:
        count: At least 0; up to 8 it stays as it is.
    """
    shift = max(0, count.bit_length() - _GRID_BITS)
    return -(-count >> shift) << shift
