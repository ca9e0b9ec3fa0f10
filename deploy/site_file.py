"""``site.toml``: what a site's operator decides, and no job can change."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.preprocessing import PREPROCESSINGS
from deploy import exchange
from deploy.addresses import parse_address
from deploy.exchange import ExchangeSpec
from federation import job_file
from federation.errors import JobError
from federation.ids import check_name
from federation.job_keys import key
from privacy.secagg.contract import WEIGHT_RULES
from privacy.secagg.ring import RING_BITS

_PAIR, _USUAL = 2, 3  # updates in a sum

UNITS = ("none", "site", "joint", "record")  # from the weakest promise on


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorSpec:
    """The aggregator, and how it proves who it is."""

    address: str = key("`HOST:PORT` of the aggregator.")
    authority: str = key("Certificate file (PEM) of the authority that it pins.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDataSpec:
    """The site's own data."""

    source: str = key(
        "`module:function` that returns `(train, held_out)`, or the URL of shards. "
        "Empty for the part of the job's own dataset that a simulation deals to "
        "this site, to rehearse with public data.",
        default="",
    )
    options: Mapping[str, Any] = key(
        "Keyword arguments of the function, or options of the URL.", default={}
    )
    preprocessing: str = key(
        "What the source takes from the data to prepare records, where it does not "
        "declare that itself: `none`, each record is prepared by itself; `public`, "
        "constants that come from elsewhere; `own`, exact statistics of this site's "
        "data; `pooled`, statistics over the data of several sites. The units `record` "
        "and `joint` permit the first two, `site` the first three. Empty if you do not "
        "vouch for it: every unit of privacy then refuses a source that declares "
        "nothing.",
        default="",
        choices=("", *PREPROCESSINGS),
    )
    name: str = key(
        "What the records are called: by this name the site remembers what they have "
        "spent of `floor.total_epsilon`, in which sums they were and in which groups. "
        "With another name they would begin anew, so give one to other people's "
        "records only: not to a new version of the same data, nor to another place "
        "of them.",
        default="records",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpec:
    """What the site trains with."""

    ranks: int = key(
        "Processes that train together, each with a GPU of its own if there are GPUs. "
        "1 trains in the agent's own process, unless `compile` is set.",
        default=1,
        low=1,
        high=64,
    )
    sharding: str = key(
        "`none`: every rank holds the whole model. `full`: each holds a part of its "
        "weights, gradients and optimiser state (FSDP2).",
        default="none",
        choices=("none", "full"),
    )
    compile: bool = key(
        "Train with `torch.compile` where it works; private steps are not compiled.",
        default=False,
    )
    restarts: int = key(
        "How often a round is begun again because a rank died.", default=2, low=0
    )
    timeout_seconds: float = key(
        "How long a rank waits for the others in a step before it gives up.",
        default=120.0,
        above=0.0,
    )
    environment: tuple[str, ...] = key(
        "Names of environment variables that ranks get besides those that Python, "
        "torch and a remote data source need.",
        default=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorSpec:
    """What the site demands of every job; a job below it is refused."""

    privacy: str = key(
        "Weakest unit of differential privacy that is accepted.",
        default="record",
        choices=UNITS,
    )
    max_epsilon: float = key(
        "Largest epsilon of a run. If `privacy` is `none`, a run beyond it counts as "
        "one without differential privacy.",
        default=8.0,
        above=0.0,
    )
    max_delta: float = key(
        "Largest delta of a run; likewise.", default=1e-4, above=0.0, below=1.0
    )
    public_held_out: bool = key(
        "Whether a job may declare the held-out data public, so that results on them "
        "leave without noise; likewise.",
        default=False,
    )
    total_epsilon: float | None = key(
        "Largest epsilon of all runs on these records together, from everything that "
        "they have released of training and held-out records. Jobs with differential "
        "privacy are refused without it.",
        default=None,
        above=0.0,
    )
    total_delta: float | None = key(
        "Delta that goes with it; by default the smallest of all the runs.",
        default=None,
        above=0.0,
        below=1.0,
    )
    secure_aggregation: bool = key(
        "Whether updates must be summed in secret.", default=True
    )
    min_sites: int | None = key(
        "Fewest updates in a secure sum: at most `threshold` of the job, which is the "
        "number of its sites where all must answer. By default 3; or 2 where `privacy` "
        "is `record`, or where `accept_two_sites` is set and the run is one of two.",
        default=None,
        low=2,
    )
    min_group: int | None = key(
        "Fewest sites of a secure sum without differential privacy that all secure "
        "sums on this data may single out together, over all runs; `min_sites` or 3 "
        "by default, or `colluding_sites` and two if that is more. 1 lets a run be "
        "repeated without a site, which gives that site's update away.",
        default=None,
        low=1,
    )
    accept_dropouts: bool = key(
        "Whether a round without differential privacy may go on without fewer sites "
        "than that (a job's `threshold` below the number of its sites). The sums "
        "before and after then tell of what the absent sites add.",
        default=False,
    )
    colluding_sites: int = key(
        "Other sites that may collude with the aggregator without learning this "
        "site's update.",
        default=0,
        low=0,
    )
    max_clip_norm: float = key(
        "Largest clip norm of an update under secure aggregation.",
        default=10.0,
        above=0.0,
    )
    max_element_bound: float | None = key(
        "Largest `element_bound` of a job, which is its `clip_norm` where it names "
        "none; no limit beside `max_clip_norm` by default. A tighter bound makes sums "
        "more precise, and says more of a site that declines because of it.",
        default=None,
        above=0.0,
    )
    ring_bits: tuple[int, ...] = key(
        "Widths of the ring that are accepted for secure sums, of 16, 24 and 32. Fewer "
        "bits are less precise, and no less secret.",
        default=RING_BITS,
    )
    weight_rules: tuple[str, ...] = key(
        "Weights that are accepted in secure sums: `examples` tell the aggregator how "
        "many examples all sites have together, `uniform` tell nothing.",
        default=WEIGHT_RULES,
    )
    require_hybrid: bool = key(
        "Whether the keys of secure sums must rest on ML-KEM-768 as well as on X25519. "
        "Without it traffic that is recorded today can be read by a quantum computer.",
        default=True,
    )
    accept_two_sites: bool = key(
        "Whether a run of two sites without record-level differential privacy is "
        "accepted: the other site can tell this one's update.",
        default=False,
    )
    max_rounds: int = key("Most rounds of a run.", default=10_000, low=1)
    functions: tuple[str, ...] = key(
        "What a job may name as model, `module:function`, or `module:*` for every "
        "function that the module itself defines. They are called with the job's "
        "options, so name nothing that can call something else.",
        default=(
            "clients.models:*",
            "clients.frozen_features:oriented_gradients",
            "clients.data:digits",
            "clients.data:breast_cancer",
        ),
    )

    def smallest_group(self, num_sites: int) -> int:
        """Fewest sites that sums together may single out, in a run of so many."""
        if self.min_group is not None:
            return self.min_group
        return max(self._fewest_open(num_sites), self.colluding_sites + 2)

    @property
    def demands_privacy(self) -> bool:
        """Whether jobs without differential privacy are refused."""
        return self.privacy != "none"

    def fewest_in_sum(self, num_sites: int) -> int:
        """Fewest updates that a secure sum of a run of so many sites must hold."""
        if self.min_sites is None and self.privacy == "record":
            return _PAIR
        return self._fewest_open(num_sites)

    def _fewest_open(self, num_sites: int) -> int:
        """The same where no differential privacy is demanded."""
        if self.min_sites is not None:
            return self.min_sites
        return _PAIR if self.accept_two_sites and num_sites == _PAIR else _USUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFile:
    """A site's configuration."""

    name: str = key("Name of the site, as in the roster and in jobs.")
    folder: str = key(
        "Where keys, ledgers and what is kept between rounds lie, relative to this "
        "file.",
        default=".",
    )
    roster: str = key(
        "Roster file, relative to `folder`; made by `crossfed keys trust` and "
        "compared by people.",
        default="roster.toml",
    )
    identity: str = key(
        "Key file of the site's identity, relative to `folder`.",
        default="identity.pem",
    )
    node_key: str = key(
        "Key file that Flower knows the site by, relative to `folder`.",
        default="node.pem",
    )
    certificate: str = key(
        "File with the certificate that the aggregator's proxy asks for and its key, "
        "relative to `folder`; made by `crossfed enroll`. Empty for none, where there "
        "is no proxy.",
        default="",
    )
    aggregator: AggregatorSpec = key("The aggregator.")
    data: SiteDataSpec = key("The site's data.", default=SiteDataSpec())
    compute: ComputeSpec = key("What it trains with.", default=ComputeSpec())
    floor: FloorSpec = key("What every job must promise.", default=FloorSpec())
    exchange: ExchangeSpec = key(
        "Where large models travel: what the aggregator's operator names.",
        default=ExchangeSpec(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteConfig:
    """A site's configuration, with its paths made whole.

    Attributes:
        file: What was read.
        folder: The working folder.
        roster: Roster file.
        identity: Key file of the identity.
        node_key: Key file of the node.
        authority: Certificate file of the aggregator's authority.
        certificate: File of the site's certificate and its key; None for none.
    """

    file: SiteFile
    folder: Path
    roster: Path
    identity: Path
    node_key: Path
    authority: Path
    certificate: Path | None = None


def load(path: Path) -> SiteConfig:
    """Read a ``site.toml``.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or wrong; the
            message names file and key.
    """
    file = job_file.load_table(path, SiteFile, _check)
    folder = path.parent / file.folder
    return SiteConfig(
        file=file,
        folder=folder,
        roster=folder / file.roster,
        identity=folder / file.identity,
        node_key=folder / file.node_key,
        authority=folder / file.aggregator.authority,
        certificate=folder / file.certificate if file.certificate else None,
    )


def _check(file: SiteFile) -> None:
    try:
        check_name(file.name)
    except ValueError as error:
        raise JobError(str(error), key="name") from None
    parse_address(file.aggregator.address, key="aggregator.address")
    exchange.check(file.exchange)
    _check_choices("floor.ring_bits", file.floor.ring_bits, RING_BITS)
    _check_choices("floor.weight_rules", file.floor.weight_rules, WEIGHT_RULES)
    if file.compute.sharding == "full" and file.compute.ranks == 1:
        raise JobError(
            "one rank holds the whole model: set compute.ranks to 2 or more",
            key="compute.sharding",
        )


def _check_choices(
    name: str, given: tuple[object, ...], known: tuple[object, ...]
) -> None:
    if not given or not set(given) <= set(known):
        listed = ", ".join(map(repr, known))
        raise JobError(f"must be a list of one or more of {listed}", key=name)
