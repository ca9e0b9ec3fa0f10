"""Sites on this host: enrolled, given a roster to trust, and started."""

from pathlib import Path

from cloud_adapters.storage.disk.part_file import file_errors
from deploy.aggregator_host import enrolment_operator
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.fleet.bringing_up.local_aggregator import address_of
from deploy.fleet.bringing_up.local_program import program, write_settings
from deploy.fleet.deployment import Deployment
from deploy.fleet.reconcile import SITE_PREFIX
from deploy.fleet.roles import NodeRequest, Tell
from deploy.fleet.tables.site_machine import SiteMachine
from deploy.site_host import enrol, enrolment_roster
from privacy import own_folder
from privacy.keystream import RandomBytes
from privacy.membership.token import Token
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.roster import Roster
from privacy.secret_files import read_private, replace_private

_SETTINGS, _TOKEN = "site.toml", "token"


def enroll(
    deployment: Deployment,
    config: AggregatorConfig,
    site: SiteMachine,
    random_bytes: RandomBytes,
    tell: Tell,
) -> None:
    """Make a site on this host a member, and write its ``site.toml``.

    Raises:
        EnrolmentRefused: It could not be enrolled.
    """
    folder = deployment.site(site.name)
    pending = folder / _TOKEN
    address = address_of(deployment, config)
    # The certificate is written last. A token that is still there then was left by a
    # command that was killed.
    if not (folder / "site.pem").exists():
        organisation = site.organisation or deployment.plan.file.organisation
        made = _token(config, site.name, pending, random_bytes, deployment)
        enrol.enroll(
            made,
            folder,
            organisation=organisation or site.name,
            clock=deployment.clock,
        )
        tell(f"{SITE_PREFIX}{site.name}: enrolled")
    with file_errors("remove", pending):
        pending.unlink(missing_ok=True)
    document = {
        "name": site.name,
        "certificate": "site.pem",
        "aggregator": {"address": address, "authority": "ca.crt"},
        **deployment.plan.settings[site.name],
    }
    write_settings(folder / _SETTINGS, document)


def _token(
    config: AggregatorConfig,
    site: str,
    pending: Path,
    random_bytes: RandomBytes,
    deployment: Deployment,
) -> Token:
    """Find the token that an earlier command was about to use, or make one.

    The keys that it was first used with may use it again: an answer that was lost is
    no harm.
    """
    if pending.exists():
        kept = Token.parse(read_private(pending).decode("ascii", "replace"))
        book = BookFile(folder=config.folder).read().at(deployment.clock.now())
        if any(each.digest == kept.digest for each in book.invitations):
            return kept
    made = enrolment_operator.invite(
        config,
        site,
        random_bytes=random_bytes,
        clock=deployment.clock,
        address=address_of(deployment, config),
    )
    with file_errors("make", pending.parent):
        own_folder.make(pending.parent)
    replace_private(pending, made.text.encode())
    return made


def accept_roster(
    deployment: Deployment, site: SiteMachine, signed: Roster | None
) -> None:
    """Have a site trust the sites that have enrolled after it, or the signed roster.

    The user who brings it up is the operator of all its sites: there is no one
    else to compare the digest with.
    """
    config = enrol.config_of(deployment.site(site.name))
    kept = roster.load(config.roster).digest
    newest = enrol.newest_roster(config, clock=deployment.clock)
    if newest.digest != kept:
        digest = newest.digest if signed is None else signed.digest
        enrolment_roster.accept_roster(config, newest, digest.hex())


def request(deployment: Deployment, site: SiteMachine) -> NodeRequest:
    """The node of a site on this host."""
    path = deployment.site(site.name) / _SETTINGS
    words = ("site", "up", "--config", str(path))
    spec = program(deployment, f"{SITE_PREFIX}{site.name}", words)
    return NodeRequest(site.pool, spec, path.read_bytes())
