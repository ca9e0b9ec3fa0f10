"""``site.toml``: what a site's operator decides, and no job can change."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.preprocessing import PREPROCESSINGS
from clients.privacy.policy_spec import PolicySpec
from deploy.wiring import exchange
from deploy.wiring.exchange import ExchangeSpec
from federation.addresses import parse_address
from federation.errors import JobError
from federation.ids import check_name
from federation.job import code_files, job_file
from federation.job.job_keys import key
from privacy.secagg.agreement.contract import WEIGHT_RULES
from privacy.secagg.arithmetic.ring import RING_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorSpec:
    """The aggregator, and how it proves who it is.

    Attributes:
        address: `HOST:PORT` of the aggregator.
        authority: Certificate file (PEM) of the authority that it pins.
    """

    address: str
    authority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDataSpec:
    """The site's own data.

    Attributes:
        source: `module:function` or `./file.py:function`, relative to this file, that
            returns `(train, held_out)`; or the URL of shards. Empty for the part of the
            job's own dataset that a simulation deals to this site, to rehearse with
            public data.
        options: Keyword arguments of the function, or options of the URL.
        preprocessing: What the source takes from the data to prepare records, where it
            does not declare that itself: `none`, each record is prepared by itself;
            `public`, constants that come from elsewhere; `own`, exact statistics of
            this site's data; `pooled`, statistics over the data of several sites. The
            units `record` and `joint` permit the first two, `site` the first three.
            Empty if you do not vouch for it: every unit of privacy then refuses a
            source that declares nothing.
        name: What the records are called: by this name the site remembers what they
            have spent of `policy.total_epsilon`, in which sums they were and in which
            groups. With another name they would begin anew, so give one to other
            people's records only: not to a new version of the same data, nor to another
            place of them.
    """

    source: str = ""
    options: Mapping[str, Any] = key(default={})
    preprocessing: str = key(default="", choices=("", *PREPROCESSINGS))
    name: str = "records"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpec:
    """What the site trains with.

    Attributes:
        ranks: Processes that train together, each with a GPU of its own if there are
            GPUs. 1 trains in the agent's own process, unless `compile` is set.
        sharding: `none`: every rank holds the whole model. `full`: each holds a part of
            its weights, gradients and optimiser state (FSDP2).
        compile: Train with `torch.compile` where it works; private steps are not
            compiled.
        restarts: How often a round is begun again because a rank died.
        timeout_seconds: How long a rank waits for the others in a step before it gives
            up.
        environment: Names of environment variables that ranks get besides those that
            Python, torch and a remote data source need.
    """

    ranks: int = key(default=1, low=1, high=64)
    sharding: str = key(default="none", choices=("none", "full"))
    compile: bool = False
    restarts: int = key(default=2, low=0)
    timeout_seconds: float = key(default=120.0, above=0.0)
    environment: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFile:
    """A site's configuration.

    Attributes:
        name: Name of the site, as in the roster and in jobs.
        folder: Where keys, ledgers and what is kept between rounds lie, relative to
            this file.
        roster: Roster file, relative to `folder`; made by `crossfed keys trust` and
            compared by people.
        identity: Key file of the site's identity, relative to `folder`.
        node_key: Key file that Flower knows the site by, relative to `folder`.
        certificate: File with the certificate that the aggregator's proxy asks for and
            its key, relative to `folder`; made by `crossfed enroll`. Empty for none,
            where there is no proxy.
        aggregator: The aggregator.
        data: The site's data.
        compute: What it trains with.
        policy: What every job must promise.
        exchange: Where large models travel: what the aggregator's operator names.
    """

    name: str
    folder: str = "."
    roster: str = "roster.toml"
    identity: str = "identity.pem"
    node_key: str = "node.pem"
    certificate: str = ""
    aggregator: AggregatorSpec
    data: LocalDataSpec = LocalDataSpec()
    compute: ComputeSpec = ComputeSpec()
    policy: PolicySpec = PolicySpec()
    exchange: ExchangeSpec = ExchangeSpec()


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
    file = job_file.load_table(path, SiteFile, _check, {"floor": "policy"})
    code_files.look_in(path.parent)
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
    _check_choices("policy.ring_bits", file.policy.ring_bits, RING_BITS)
    _check_choices("policy.weight_rules", file.policy.weight_rules, WEIGHT_RULES)
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
