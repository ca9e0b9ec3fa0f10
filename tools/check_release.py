"""Refuse to build a release whose price table nobody has compared lately.

    python tools/check_release.py [URL]

`make dist` runs this. With a URL it builds a release: a table of more than 90 days is
then an error, and without one a warning. `tools/refresh_prices.py` writes a new table.
"""

import sys

from deploy.fleet import prices
from federation.clock import SystemClock


def doubt(today: float) -> str:
    """What is wrong with the price table of this release; empty for nothing.

    Args:
        today: Seconds since 1970.
    """
    said: list[str] = []
    prices.load(None, today=prices.day_of(today), warn=said.append)
    return "".join(said)


def main(url: str, *, today: float) -> int:
    """Say it; the exit code.

    Args:
        url: Where the release will be published; empty if it will not.
        today: Seconds since 1970.
    """
    said = doubt(today)
    if said:
        print(f"{said} (tools/refresh_prices.py writes one)", file=sys.stderr)
    return bool(said and url)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], today=SystemClock().now()))
