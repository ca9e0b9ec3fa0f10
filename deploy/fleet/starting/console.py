"""What a machine of a cloud, or a pod in its log, says about the start of its site."""

import re

FAILED = "the site was not started"
READY = "site: it is ready"
_OURS = "crossfed: "
# What an agent logs; a pod runs nothing else that could say so.
_CONNECTED = re.compile(r"\bconnected to \S+ as node ")
_SHOWN = 2000


def has_failed(log: str) -> bool:
    """Whether a console says that the machine's site could not be started."""
    return f"{_OURS}{FAILED}" in log


def is_ready(log: str) -> bool:
    """Whether a console says that the machine's site has started."""
    return f"{_OURS}{READY}" in log or _CONNECTED.search(log) is not None


def end_of(log: str) -> str:
    """The last lines of a console, for a message."""
    shown = log[-_SHOWN:]
    if len(shown) < len(log):  # Its first line may begin in the middle.
        shown = shown.partition("\n")[2] or shown
    return shown.strip() or "(no line of it was kept)"
