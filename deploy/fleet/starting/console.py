"""What a machine of a cloud says on its console about its start."""

FAILED = "the site was not started"
READY = "site: it is ready"
_OURS = "crossfed: "
_SHOWN = 2000


def has_failed(log: str) -> bool:
    """Whether a console says that the machine's site could not be started."""
    return f"{_OURS}{FAILED}" in log


def is_ready(log: str) -> bool:
    """Whether a console says that the machine's site has started."""
    return f"{_OURS}{READY}" in log


def end_of(log: str) -> str:
    """The last lines of a console, for a message."""
    return log[-_SHOWN:].strip() or "(the cloud has kept no line of it)"
