"""A site's own page and metrics: what ``crossfed site status`` says, for its operator.

They show only what the site's folder holds, and nothing of it leaves the host.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deploy.site_host import run_status
from deploy.site_host.config import SiteConfig
from deploy.web_server import serving
from federation.errors import FederationError
from federation.protocols import Clock
from privacy.secret_files import read_private, write_new

FILE, METRICS_FILE = "page.token", "metrics.token"
MAX_RUNS = 50  # The newest.


@contextmanager
def served(
    config: SiteConfig, *, clock: Clock, listener: Callable[[str], None]
) -> Iterator[None]:
    """Serve page and metrics while the context lasts, if ``monitor.port`` asks for it.

    A page that cannot be served is reported, and keeps no site from its work.

    Args:
        config: The site's.
        clock: Tells time.
        listener: Called with a word about what is wrong.
    """
    with contextlib.ExitStack() as stack:
        if config.file.monitor.port:
            from deploy.site_host.site_metrics import SiteCollector  # noqa: PLC0415
            from monitoring.web.app import site_app  # noqa: PLC0415 -- imports much

            try:
                token, metrics_token = (_token(config, n) for n in (FILE, METRICS_FILE))
                page = serving(
                    lambda port: site_app(
                        lambda: _shown(config, clock),
                        token=token,
                        port=port,
                        metrics=SiteCollector(config),
                        metrics_token=metrics_token,
                    ),
                    config.file.monitor.port,
                    clock=clock,
                    last_look_seconds=0.0,
                )
                stack.enter_context(page)
            except (FederationError, OSError) as error:
                listener(f"this site has no page: {error}")
        yield


def address(config: SiteConfig) -> str:
    """Where the operator's browser finds the page; empty if there is none."""
    port = config.file.monitor.port
    if not port or not (config.folder / FILE).exists():
        return ""
    return f"http://127.0.0.1:{port}/?token={_token(config, FILE)}"


def _token(config: SiteConfig, name: str) -> str:
    path = config.folder / name
    if not path.exists():
        write_new(path, secrets.token_urlsafe(32).encode())
    return read_private(path).decode().strip()


def _shown(config: SiteConfig, clock: Clock) -> dict[str, object]:
    found, now = run_status.status(config, MAX_RUNS), clock.now()
    runs = [*run_status.of_runs(found, now)]
    about = run_status.about(found, now)
    return {"site": found.site, "about": [*about], "runs": runs[::-1]}
