"""Whether the program of this container serves: exit code 0, or 1 and the reason.

Only the standard library, since it runs every half minute. An aggregator answers
``GET /health`` through its own proxy. A site listens nowhere: it is well while it has a
connection to its aggregator, which it uses at least every three seconds.
"""

import http.client
import ssl
import sys
import tomllib
from pathlib import Path

SECONDS = 8.0
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED = "01"
_OK = 200


def aggregator(config: Path) -> str:
    """Ask the aggregator of a configuration file.

    Returns:
        What is wrong; empty if nothing is.
    """
    listen = tomllib.loads(config.read_text("utf-8")).get("listen", "0.0.0.0:8443")
    host, _, port = listen.rpartition(":")
    everywhere = host in {"0.0.0.0", "[::]"}  # noqa: S104 -- it is only compared
    context = ssl.create_default_context(cafile=str(config.parent / "ca.crt"))
    # Its certificate names the addresses that sites use, and not this one.
    context.check_hostname = False
    line = http.client.HTTPSConnection(
        "127.0.0.1" if everywhere else host.strip("[]"),
        int(port),
        timeout=SECONDS,
        context=context,
    )
    try:
        line.request("GET", "/health")
        answer = line.getresponse()
        return "" if answer.status == _OK else answer.read(200).decode(errors="replace")
    finally:
        line.close()


def site(config: Path, tables: tuple[Path, ...] = _TABLES) -> str:
    """Look for the connection of the site of a configuration file.

    Args:
        config: ``site.toml``.
        tables: Of the connections in this network namespace, as the kernel writes them.

    Returns:
        What is wrong; empty if nothing is.
    """
    address = tomllib.loads(config.read_text("utf-8"))["aggregator"]["address"]
    port = int(address.rpartition(":")[2])
    for table in tables:
        rows = table.read_text("ascii").splitlines()[1:] if table.exists() else []
        for _, _, remote, state, *_ in map(str.split, rows):
            if state == _ESTABLISHED and int(remote.rpartition(":")[2], 16) == port:
                return ""
    return f"no connection to the aggregator at {address}"


def main(arguments: list[str]) -> int:
    """Say what is wrong, if anything is."""
    kind, config = arguments
    try:
        trouble = {"aggregator": aggregator, "site": site}[kind](Path(config))
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        trouble = f"{type(error).__name__}: {error}"
    if trouble:
        print(trouble, file=sys.stderr)  # noqa: T201 -- for the runtime's log
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
