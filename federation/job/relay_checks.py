"""What the tables of relays must not hold.

What a job with relays must not ask for is in ``federation.methods.relays``.
"""

from federation.errors import JobError
from federation.ids import check_name
from federation.job.spec import JobSpec


def check_relays(job: JobSpec) -> None:
    """Refuse relays that do not fit the sites, or that the job cannot do without.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    _check_lines(job)
    if not job.relays:
        return
    _check_names(job)
    _check_sites(job)
    largest = max(job.relays, key=lambda relay: len(relay.sites))
    left, quorum = len(job.sites) - len(largest.sites), job.minimum_sites
    if left < quorum:
        secure = job.privacy.secure_aggregation.enabled
        key = (
            "privacy.secure_aggregation.threshold"
            if secure
            else ("schedule.minimum_sites")
        )
        raise JobError(
            f"without relay {largest.name!r} {left} of {len(job.sites)} sites are "
            f"left, and a round needs {quorum}: set {key} = {left} if that is allowed, "
            "or give the relay fewer sites",
            key=key,
        )


def _check_names(job: JobSpec) -> None:
    taken = {site.name for site in job.sites}
    for index, relay in enumerate(job.relays):
        key = f"relays[{index}].name"
        try:
            check_name(relay.name)
        except ValueError as error:
            raise JobError(str(error), key=key) from None
        if relay.name in taken:
            raise JobError(f"a site or another relay is called {relay.name!r}", key=key)
        taken.add(relay.name)


def _check_sites(job: JobSpec) -> None:
    names, relay_of = {site.name for site in job.sites}, dict[str, str]()
    for index, relay in enumerate(job.relays):
        key = f"relays[{index}].sites"
        if not relay.sites:
            raise JobError(f"relay {relay.name!r} has no sites", key=key)
        for site in relay.sites:
            if site not in names:
                raise JobError(
                    f"there is no site {site!r}; the sites are "
                    f"{', '.join(sorted(names))}",
                    key=key,
                )
            if site in relay_of:
                raise JobError(
                    f"site {site!r} is already behind relay {relay_of[site]!r}: name "
                    "it once",
                    key=key,
                )
            relay_of[site] = relay.name


def _check_lines(job: JobSpec) -> None:
    names, seen = {relay.name for relay in job.relays}, set[str]()
    for index, line in enumerate(job.simulation.relays):
        key = f"simulation.relays[{index}].relay"
        if line.relay not in names:
            raise JobError(f"there is no relay {line.relay!r}", key=key)
        if line.relay in seen:
            raise JobError(f"relay {line.relay!r} has two lines", key=key)
        seen.add(line.relay)
