"""A federation of real processes with everything that can be struck.

The aggregator is on this host; each site and the object store have one of their own.
What processes write lies on small disks.
"""

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults import disks, jobs, store_process
from faults.cells import Victim
from support.deployment import CLOCK, Deployment, deployed
from support.network import Network, network

STORE = "store"
_RANKS = "\n[compute]\nranks = 2\n"


@dataclass(kw_only=True)
class Rig:
    """A running federation, its network and its store.

    Attributes:
        deployment: Aggregator and sites.
        net: How they are connected.
        store: Process of the object store.
        is_ranked: Whether the struck site trains with two ranks.
    """

    deployment: Deployment
    net: Network
    store: subprocess.Popen[bytes] | None = None
    is_ranked: bool = False

    @property
    def folder(self) -> Path:
        return self.deployment.folder

    def disk_of(self, victim: Victim) -> Path:
        """Folder of what a victim writes."""
        return disk_folders(self.folder)[victim]

    def start_store(self) -> None:
        """Start the store, and wait until it answers."""
        self.store = store_process.start(
            self.net.addresses[STORE],
            where=self.net.inside(STORE),
            log=self.folder / "store.log",
        )

    def stop_store(self) -> None:
        """End the store, whatever has befallen it."""
        if self.store is not None:
            self.store.kill()
            self.store.wait()

    def signal_store(self, number: signal.Signals) -> None:
        """Send the store a signal."""
        assert self.store is not None
        self.store.send_signal(number)

    def use_ranks(self, *, wanted: bool) -> None:
        """Have the struck site train with two ranks, or with one."""
        if wanted == self.is_ranked:
            return
        path = self.folder / jobs.STRUCK / "site.toml"
        text = path.read_text().replace(_RANKS, "")
        path.write_text(text + _RANKS if wanted else text)
        self.is_ranked = wanted
        self.restart_site()

    def use_sites(self, names: Sequence[str]) -> None:
        """Have these sites' agents run, and no others: idle ones poll."""
        running = set(self.deployment.processes) & {*jobs.SITES}
        for name in running - {*names}:
            self.stop_site(name)
        for name in {*names} - running:
            self.deployment.start_site(name)

    def restart_site(self) -> None:
        """Stop the struck site's agent, and start it again."""
        self.stop_site(jobs.STRUCK)
        self.deployment.start_site(jobs.STRUCK)

    def stop_site(self, name: str) -> None:
        """Stop a site's agent."""
        process = self.deployment.processes.pop(name)
        process.terminate()
        process.wait(60)

    def ended(self) -> list[str]:
        """Processes that have ended although nobody has struck them."""
        processes = self.deployment.processes.items()
        return [name for name, one in processes if one.poll() is not None]

    def forget_runs(self) -> None:
        """Remove what runs have left at the aggregator: its disk is small."""
        for run in (self.folder / "aggregator" / "runs").glob("*/*/"):
            shutil.rmtree(run)

    def revive(self) -> None:
        """Start again what has ended."""
        for name in self.ended():
            if name in jobs.SITES:
                self.deployment.start_site(name)
            else:
                self.deployment.start_aggregator()
        if self.store is None or self.store.poll() is not None:
            self.start_store()


def disk_folders(folder: Path) -> dict[Victim, Path]:
    """Where each victim that writes files does so."""
    return {
        Victim.COORDINATOR: folder / "aggregator" / "runs",
        Victim.SUPERLINK: folder / "aggregator" / "flower",
        Victim.PROXY: folder / "aggregator" / "proxy",
        Victim.SITE: folder / jobs.STRUCK,
    }


@contextmanager
def rig(folder: Path) -> Iterator[Rig]:
    """Build one, and take it down."""
    with ExitStack() as stack:
        net = stack.enter_context(network([*jobs.SITES, STORE]))
        stack.enter_context(disks.disks([*disk_folders(folder).values()]))
        exchange = store_process.table(net.addresses[STORE], threshold_mb=1)
        deployment = stack.enter_context(
            deployed(
                folder,
                jobs.POLICY + exchange,
                host=net.address,
                namespaces=net.namespaces,
                environment=store_process.CREDENTIALS,
                sites=jobs.SITES,
                started=False,
            )
        )
        with Path(deployment.config).open("a") as config:
            config.write(exchange)
        made = Rig(deployment=deployment, net=net)
        stack.callback(made.stop_store)
        made.start_store()
        yield made


def pause(seconds: float) -> None:
    """Wait."""
    CLOCK.sleep(seconds)
