"""``site.toml``: the decisions of a site's operator, which no job can change."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clients.preprocessing import PREPROCESSINGS
from clients.privacy.policy_spec import FILL_IN, PolicySpec
from deploy.site_host import home_spec
from deploy.site_host.home_spec import HomeSpec
from deploy.wiring import exchange
from deploy.wiring.exchange import ExchangeSpec
from federation.addresses import is_host, parse_address
from federation.errors import JobError
from federation.ids import check_name
from federation.job import code_files, job_file
from federation.job.job_keys import key
from federation.job.metrics import is_function
from federation.job.privacy_job import LEVELS
from privacy.secagg.agreement.contract import WEIGHT_RULES
from privacy.secagg.arithmetic.ring import RING_BITS

_ADVICE = (
    "run this in the folder of an enrolled site, or name its site.toml (--config "
    "FILE; --folder DIR of `crossfed enroll`); `crossfed enroll` makes this "
    "machine a site and creates the file"
)
_SIGNER = re.compile("[0-9a-f]{64}")
_MODULE = re.compile(r"[A-Za-z_][\w.]*:\*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorSpec:
    """The aggregator, and how it proves who it is.

    Attributes:
        address: `HOST:PORT` of the aggregator.
        authority: Certificate file (PEM) of the aggregator's authority, which this site
            pins.
    """

    address: str
    authority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLinkSpec:
    """The relay of this site's cloud, and how it proves who it is.

    Attributes:
        address: `HOST:PORT` of the relay.
        authority: Certificate file (PEM) of the relay's authority, which this site
            pins, relative to `folder`: a copy of `relay/ca.crt` in the relay's folder.
    """

    address: str
    authority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpec:
    """What makes this a relay: it serves sites of its cloud, and trains nothing.

    Attributes:
        listen: `HOST:PORT` to listen at.
        hosts: Names and addresses by which sites reach it, for its certificate.
        sites: Names of the sites that may connect.
    """

    listen: str
    hosts: tuple[str, ...]
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePageSpec:
    """How the site's operator sees what it does.

    Attributes:
        port: Port of the site's own page and of `/metrics` on the loopback interface; 0
            for neither. `crossfed site status` prints the page's address.
    """

    port: int = key(default=0, low=0, high=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDataSpec:
    """The site's own data.

    Attributes:
        source: `module:function` or `./file.py:function`, relative to this file, that
            returns `(train, held_out)`; or the URL of shards. If empty, the site uses
            the part of the job's own dataset that a simulation would give it, to
            rehearse with public data.
        options: Keyword arguments of the function, or options of the URL. Relative
            paths begin at the agent's working folder.
        preprocessing: What the source derives from the data to prepare records, if it
            does not declare this itself: `none`, each record is prepared separately;
            `public`, constants that come from elsewhere; `own`, exact statistics of
            this site's data; `pooled`, statistics over the data of several sites. The
            units `record`, `person` and `joint` permit the first two, `site` the first
            three. Leave it empty if you cannot vouch for the source.
        name: Name of the records, under which the site remembers how much of
            `policy.total_epsilon` they have spent, and their sums and groups. A new
            name starts from zero: use one only for different people's records, never
            for a new version or location of the same data.
    """

    source: str = ""
    options: Mapping[str, Any] = key(default={})
    preprocessing: str = key(default="", choices=("", *PREPROCESSINGS))
    name: str = "records"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpec:
    """What the site trains with.

    Attributes:
        gpus: Number of GPUs that the agent must see, or it does not start; 0 trains
            with those that are there.
        ranks: Number of processes that train together, each with its own GPU if there
            are GPUs. 1 trains in the agent's process, unless `compile` is set.
        sharding: `none`: every rank holds the whole model. `full`: each rank holds a
            part of the weights, gradients and optimiser state (FSDP2).
        compile: Train with `torch.compile` where it works; private steps are not
            compiled.
        restarts: How many times a round is retried after a rank died.
        timeout_seconds: How long a rank waits for the others in one step before it
            fails.
        notices: Whose notice makes the site leave before its machine is preempted:
            `aws` asks the metadata service of EC2 (spot interruption, two minutes),
            `gcp` that of Compute Engine (preemption, 30 seconds).
        keep_steps_seconds: Time between two copies of a round's local steps, for
            machines that may vanish without a notice; 0 makes a copy only when the site
            has to leave.
        measure: Note each second what this machine does and the energy it takes, in
            files of `folder`.
        grams_per_kwh: Carbon intensity of the machine's electricity, gCO2e per kWh as
            its supplier states it; 0 if you do not know.
        environment: Further environment variables to pass to ranks, by name.
    """

    gpus: int = key(default=0, low=0, high=64)
    ranks: int = key(default=1, low=1, high=64)
    sharding: str = key(default="none", choices=("none", "full"))
    compile: bool = False
    restarts: int = key(default=2, low=0)
    timeout_seconds: float = key(default=120.0, above=0.0)
    notices: str = key(default="none", choices=("none", "aws", "gcp"))
    keep_steps_seconds: float = key(default=0.0, low=0.0)
    measure: bool = True
    grams_per_kwh: float = key(default=0.0, low=0.0)
    environment: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFile:
    """A site's configuration.

    Attributes:
        name: Name of the site, as in the roster and in jobs.
        folder: Folder for keys, ledgers and state between rounds, relative to this
            file.
        roster: Roster file, relative to `folder`; created by `crossfed enroll` or
            `crossfed keys trust`.
        identity: Key file with the site's identity, relative to `folder`.
        node_key: Key file that identifies the site to Flower, relative to `folder`.
        certificate: File with the client certificate for the aggregator's proxy and its
            key, relative to `folder`; created by `crossfed enroll`. Empty if there is
            no proxy.
        roster_signer: Public key of the operator of several sites, 64 hexadecimal
            digits: rosters that it has signed are accepted without a person.
        aggregator: Where the aggregator is, and how it proves itself.
        data: The site's data.
        compute: What it trains with.
        policy: What every job must promise.
        exchange: Where large models travel: what the aggregator's operator names.
        home: Where keys, ledgers and memory outlive the machine.
        relay: The relay through which this site takes part in runs; by default it
            connects to the aggregator.
        serve: Only for a relay: whom it serves.
        monitor: How the site's operator sees what it does.
        disk_mib: From this size of a model in MiB on, residuals of updates, and the
            model and momentum that a site follows by itself, are in files of `folder`;
            0 for never.
        max_runs: How many runs the site keeps at work at once, each with its model and
            data in memory. It works on their tasks one after another, so a job's
            `schedule.round_deadline_seconds` must allow for the others.
        memory_mib: Memory in MiB that all runs at work may take together, by what their
            jobs state (`schedule.memory_mib`) or this site reported earlier; an
            unknown need counts as nothing. 0 for no limit.
        gpu_memory_mib: The same of the GPUs' memory, by what jobs state alone.
    """

    name: str
    folder: str = "."
    roster: str = "roster.toml"
    identity: str = "identity.pem"
    node_key: str = "node.pem"
    certificate: str = ""
    roster_signer: str = ""
    aggregator: AggregatorSpec
    data: LocalDataSpec = LocalDataSpec()
    compute: ComputeSpec = ComputeSpec()
    policy: PolicySpec = PolicySpec()
    exchange: ExchangeSpec = ExchangeSpec()
    home: HomeSpec = HomeSpec()
    relay: RelayLinkSpec | None = None
    serve: ServeSpec | None = None
    monitor: SitePageSpec = SitePageSpec()
    disk_mib: int = key(default=0, low=0)
    max_runs: int = key(default=1, low=1, high=64)
    memory_mib: int = key(default=0, low=0)
    gpu_memory_mib: int = key(default=0, low=0)


def _no_home() -> None:
    """Make nothing durable elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteConfig:
    """A site's configuration, with its paths made whole.

    Attributes:
        path: Where it is.
        file: What was read.
        folder: The working folder.
        roster: Roster file.
        identity: Key file of the identity.
        node_key: Key file of the node.
        authority: Certificate file of the aggregator's authority.
        certificate: File of the site's certificate and its key; None for none.
        confirm: Makes what is in the folder durable in the site's home; does nothing
            if it has none.
    """

    path: Path
    file: SiteFile
    folder: Path
    roster: Path
    identity: Path
    node_key: Path
    authority: Path
    certificate: Path | None = None
    confirm: Callable[[], None] = field(default=_no_home, compare=False)


def load(path: Path) -> SiteConfig:
    """Read a ``site.toml``.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or wrong; the
            message names file and key.
    """
    file = job_file.load_table(
        path, SiteFile, check, {"floor": "policy"}, advice=_ADVICE
    )
    code_files.look_in(path.parent)
    folder = path.parent / file.folder
    return SiteConfig(
        path=path,
        file=file,
        folder=folder,
        roster=folder / file.roster,
        identity=folder / file.identity,
        node_key=folder / file.node_key,
        authority=folder / file.aggregator.authority,
        certificate=folder / file.certificate if file.certificate else None,
    )


def read_again(config: SiteConfig) -> SiteConfig:
    """Read ``[policy]`` and ``[data]`` again; the rest holds until a restart.

    Raises:
        JobError: See ``load``. The message stays at the site.
    """
    try:
        newest = load(config.path).file
    except JobError as error:
        raise JobError(str(error), outside="the site's site.toml is wrong") from error
    file = replace(config.file, policy=newest.policy, data=newest.data)
    return replace(config, file=file)


def check(file: SiteFile) -> None:
    """Refuse what contradicts itself.

    Raises:
        JobError: It does.
    """
    try:
        check_name(file.name)
    except ValueError as error:
        raise JobError(str(error), key="name") from None
    parse_address(file.aggregator.address, key="aggregator.address")
    if file.roster_signer and not _SIGNER.fullmatch(file.roster_signer):
        raise JobError("must be 64 hexadecimal digits", key="roster_signer")
    if FILL_IN in f"{file.data}":
        raise JobError(
            f"still has a {FILL_IN!r}: put in what it stands for", key="data"
        )
    _check_relay(file)
    exchange.check(file.exchange)
    home_spec.check(file.home, file.identity)
    _check_choices("policy.ring_bits", file.policy.ring_bits, RING_BITS)
    _check_choices("policy.levels", file.policy.levels, LEVELS, fewest=0)
    _check_choices("policy.weight_rules", file.policy.weight_rules, WEIGHT_RULES)
    for name in file.policy.functions:
        if not (is_function(name) or _MODULE.fullmatch(name)):
            raise JobError(
                f"{name!r} matches no function: give module:function, module:* for all "
                "that a module defines, or ./file.py:function for each of a file",
                key="policy.functions",
            )
    if file.compute.sharding == "full" and file.compute.ranks == 1:
        raise JobError(
            "one rank holds the whole model: set compute.ranks to 2 or more",
            key="compute.sharding",
        )


def _check_relay(file: SiteFile) -> None:
    if file.relay is not None:
        parse_address(file.relay.address, key="relay.address")
    if file.serve is None:
        return
    parse_address(file.serve.listen, key="serve.listen")
    if file.relay is not None:
        raise JobError(
            "a relay connects to the aggregator: remove this table, or [serve]",
            key="relay",
        )
    _check_serve(file.serve)
    if file.home.url:
        raise JobError(
            "a relay keeps nothing that must outlive its machine but its keys: remove "
            "[home], and keep a copy of the folder's keys",
            key="home.url",
        )


def _check_serve(serve: ServeSpec) -> None:
    if not serve.hosts:
        raise JobError(
            "is empty: give the names and addresses by which sites reach this relay",
            key="serve.hosts",
        )
    for host in serve.hosts:
        if not is_host(host):
            raise JobError(
                f"{host!r:.200} is not a host name or address", key="serve.hosts"
            )
    if not serve.sites:
        raise JobError(
            "is empty: name the sites that may connect to this relay",
            key="serve.sites",
        )
    for site in serve.sites:
        try:
            check_name(site)
        except ValueError as error:
            raise JobError(str(error), key="serve.sites") from None


def _check_choices(
    name: str, given: tuple[object, ...], known: tuple[object, ...], *, fewest: int = 1
) -> None:
    if len(given) < fewest or not set(given) <= set(known):
        listed = ", ".join(map(repr, known))
        some = "one or more of " if fewest else "some of "
        raise JobError(f"must be a list of {some}{listed}", key=name)
