"""Machines of one site: a folder each, and one home."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clients.home.folder_copy import FolderCopy
from clients.home.home import Home
from clients.home.lease import HomeLease
from federation.clock import VirtualClock
from federation.protocols import Clock, ObjectStore
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_files import HeadKey
from privacy.dp.ledger.ledger_format import Terms

SITE, RUN = "site-0", "20260102-030405-abcdef"
LEASE_SECONDS = 60.0
NAMES = ("identity.pem", "node.pem", "roster.toml")
EVENT = PrivacyEvent(noise_multiplier=2.0, sampling_rate=0.1, steps=3, slack=0.0)
TERMS = Terms(
    run_id=RUN,
    site=SITE,
    job_digest="00" * 32,
    unit="record",
    relation="add or remove one record",
    sampling="Poisson",
    delta=1e-5,
    epsilon_cap=1000.0,
)


def no_key() -> HeadKey:
    """A site whose ledgers are not signed."""
    return None  # type: ignore[return-value]


@dataclass(eq=False)
class Machine:
    """A process of the site, with its folder and a clock of its own."""

    folder: Path
    store: ObjectStore
    clock: Clock = field(default_factory=VirtualClock)
    seconds: float = LEASE_SECONDS
    told: list[str] = field(default_factory=list)
    home: Home = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        lease = HomeLease(
            self.store,
            self.clock,
            site=SITE,
            node=self.folder.name,
            seconds=self.seconds,
        )
        copy = FolderCopy(folder=self.folder, store=self.store, names=NAMES)
        self.home = Home(
            copy,
            lease,
            identity=NAMES[0],
            clock=self.clock,
            listener=self.told.append,
        )

    def enter(self, *, take_over: bool = False, looks: int = 100) -> bool:
        left = iter(range(looks))

        def wait(seconds: float) -> bool:
            self.clock.sleep(seconds)
            return next(left, None) is None

        return self.home.enter(wait=wait, head_key=no_key, take_over=take_over)

    @property
    def ledger_folder(self) -> Path:
        return self.folder / "runs" / RUN / "sites" / SITE

    def charge(self, round_index: int, confirm: Callable[[], None] | None = None):
        """Charge a round here, and then in the home; only then is it confirmed."""
        ledger = FileLedger(self.ledger_folder, TERMS, clock=self.clock)
        try:
            ledger.charge(EVENT, round_index=round_index)
        finally:
            ledger.close()
        (confirm or self.home.confirm)()

    def rounds(self) -> list[int]:
        """The rounds that are charged in the ledger of this folder."""
        ledger = FileLedger(self.ledger_folder, TERMS, clock=self.clock)
        ledger.close()
        return [charge.round_index for charge in ledger.charges()]


def first(folder: Path, store: ObjectStore) -> Machine:
    """The machine that the site was enrolled on."""
    made = Machine(folder, store)
    for name in NAMES:
        (folder / name).write_text(f"the {name} of {SITE}")
        (folder / name).chmod(0o600)
    return made
