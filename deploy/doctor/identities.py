"""This machine's identity in a cloud, which its clients would use.

The libraries of the clouds look for it as they do in a run, with a second for every
question. Reported are the kind and the name of an identity, never a secret; what
a library says of a failure is not repeated, as it may hold one.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from cloud_adapters.extras import naming_extras
from cloud_adapters.urls import parse_url
from deploy.doctor.checks import Check
from federation.job.spec import JobSpec

Cloud = Literal["aws", "gcp"]

QUESTION_SECONDS = 1.0
# All questions about one cloud. Some libraries wait between attempts, or run commands
# that a profile names.
LIMIT_SECONDS = 15.0

_CLOUD_NAMES: Mapping[Cloud, str] = {"aws": "AWS", "gcp": "Google Cloud"}
_AWS_KINDS = {
    "env": "keys in the environment",
    "shared-credentials-file": "keys in the credentials file",
    "config-file": "keys in the configuration file",
    "assume-role": "a role that the profile assumes",
    "assume-role-with-web-identity": "a role from a web identity token",
    "custom-process": "the credential process of the profile",
    "sso": "a person's single sign-on",
    "login": "a person's login",
    "container-role": "the role of the container",
    "iam-role": "the role of the instance",
}
_AWS_KEYS = frozenset({"env", "shared-credentials-file", "config-file"})
_AWS_NONE = (
    "none: no keys and no profile in the environment or in ~/.aws, and no container or "
    "instance metadata service that provides a role"
)
_GCP_NONE = (
    "none: GOOGLE_APPLICATION_CREDENTIALS names no file, there is no application "
    "default login, and no metadata server answers"
)
_THREAD = "identity"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudIdentity:
    """The identity that was found.

    Attributes:
        kind: Where it comes from; or why there is none.
        principal: What the cloud calls it; empty if that is not known.
        doubt: Why it may not work; empty if nothing was found wrong.
        exists: Whether there is one.
        is_long_lived: Whether it is a key that does not expire by itself.
    """

    kind: str
    principal: str = ""
    doubt: str = ""
    exists: bool = True
    is_long_lived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A cloud that is used.

    Attributes:
        cloud: Which.
        why: A URL or a key that is there.
        is_own: Whether it is the cloud's own service, and not one at an endpoint that
            speaks as it does.
    """

    cloud: Cloud
    why: str
    is_own: bool = True


def needs_of_job(job: JobSpec) -> Iterator[Need]:
    """Clouds that a job uses: for the run, for data, for keys."""
    storage = job.storage
    yield from needs_of_url(storage.url, is_own=not storage.endpoint)
    sources = [job.data, *(site.data for site in job.sites)]
    for data in sources:
        if data is None or "://" not in data.source:
            continue
        is_own = not data.options.get("endpoint")
        yield from needs_of_url(data.source, is_own=is_own)
        yield from _needs_of_key(
            str(data.options.get("encryption_key", "")),
            is_own=not data.options.get("encryption_endpoint"),
        )
    if storage.encryption is not None:
        spec = storage.encryption
        yield from _needs_of_key(spec.key, is_own=not spec.endpoint)


def needs_of_url(url: str, *, is_own: bool = True) -> Iterator[Need]:
    """The cloud of a store, if it is in one.

    Raises:
        JobError: It names no store.
    """
    scheme = parse_url(url).scheme
    if scheme == "s3":
        yield Need(cloud="aws", why=url, is_own=is_own)
    elif scheme == "gs":
        yield Need(cloud="gcp", why=url, is_own=is_own)


def _needs_of_key(name: str, *, is_own: bool) -> Iterator[Need]:
    kind = name.partition(":")[0]
    if kind == "aws-kms":
        yield Need(cloud="aws", why=name, is_own=is_own)
    elif kind == "gcp-kms":
        yield Need(cloud="gcp", why=name, is_own=is_own)


def merged(needs: Iterable[Need]) -> list[Need]:
    """One need for each cloud; of its own services if one of them is."""
    found: dict[Cloud, Need] = {}
    for need in needs:
        known = found.get(need.cloud)
        if known is None or (need.is_own and not known.is_own):
            found[need.cloud] = need
    return list(found.values())


def checks(needs: Iterable[Need]) -> Iterator[Check]:
    """Report this machine's identity in each cloud that is used."""
    for need in merged(needs):
        yield _check(need, look(need))


def _check(need: Need, found: CloudIdentity) -> Check:
    name = f"identity for {_CLOUD_NAMES[need.cloud]}"
    advice = f"{need.why} needs one: see docs/howto/cloud-identity.md"
    said = f"{found.kind}: {found.principal}" if found.principal else found.kind
    if found.doubt:
        said = f"{said}; {found.doubt}"
    if not found.exists:
        return Check(name=name, status="problem", found=said, advice=advice)
    if found.is_long_lived:
        said = f"{said}; this key does not expire, so a leaked copy stays valid"
        advice = "use the identity of the machine: see docs/howto/cloud-identity.md"
        return Check(name=name, status="warning", found=said, advice=advice)
    if found.doubt:
        return Check(name=name, status="warning", found=said, advice=advice)
    return Check(name=name, status="ok", found=said)


def look(need: Need) -> CloudIdentity:
    """Find this machine's identity in a cloud, within a few seconds."""
    question = {"aws": _aws, "gcp": _gcp}[need.cloud]
    found = _within(lambda: question(is_own=need.is_own))
    if found is not None:
        return found
    return CloudIdentity(
        kind=f"unknown: the lookup took longer than {LIMIT_SECONDS:.0f} s",
        doubt="a credential process or a metadata service does not answer",
        exists=False,
    )


def _within(question: Callable[[], _Found]) -> _Found | None:
    """Answer a question, or give up after a while; None then."""
    future: Future[_Found] = Future()

    def answer() -> None:
        try:
            future.set_result(question())
        except BaseException as error:  # noqa: BLE001 -- the waiting thread gets it
            future.set_exception(error)

    threading.Thread(target=answer, name=_THREAD, daemon=True).start()
    try:
        return future.result(LIMIT_SECONDS)
    except TimeoutError:
        return None


@naming_extras()
def _aws(*, is_own: bool) -> CloudIdentity:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 -- slow

    try:
        session = _aws_session()
        credentials = session.get_credentials()
        if credentials is None:
            return CloudIdentity(kind=_AWS_NONE, exists=False)
        frozen = credentials.get_frozen_credentials()
    except (BotoCoreError, ClientError) as error:
        return CloudIdentity(
            kind=f"no working credentials ({_name_of(error)})",
            doubt="the configured profile or role provides no credentials",
            exists=False,
        )
    method = str(credentials.method)
    kind = _AWS_KINDS.get(method, method)
    principal, doubt = _aws_principal(session) if is_own else ("", "")
    return CloudIdentity(
        kind=kind,
        principal=principal,
        doubt=doubt,
        is_long_lived=method in _AWS_KEYS and not frozen.token,
    )


def _aws_session() -> Any:
    """A session that waits a second."""
    import botocore.session  # noqa: PLC0415 -- slow to import
    from botocore.config import Config  # noqa: PLC0415

    session = botocore.session.Session()
    session.set_config_variable("metadata_service_timeout", QUESTION_SECONDS)
    session.set_config_variable("metadata_service_num_attempts", 1)
    session.set_default_client_config(
        Config(
            connect_timeout=QUESTION_SECONDS,
            read_timeout=QUESTION_SECONDS,
            retries={"mode": "standard", "total_max_attempts": 1},
        )
    )
    return session


def _aws_principal(session: Any) -> tuple[str, str]:
    """Ask STS for the identity: its name, and what is wrong."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    region = session.get_config_variable("region") or "us-east-1"
    try:
        client = session.create_client("sts", region_name=region)
        return str(client.get_caller_identity()["Arn"]), ""
    except ClientError as error:
        return "", f"AWS STS does not accept it ({_name_of(error)})"
    except BotoCoreError as error:
        return "", f"AWS STS, which would name it, is unreachable ({_name_of(error)})"


def _name_of(error: Exception) -> str:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", type(error).__name__))
    return type(error).__name__


@naming_extras()
def _gcp(*, is_own: bool) -> CloudIdentity:
    # Its warnings of single attempts say less than what is found in the end.
    log = logging.getLogger("google.auth")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return _ask_google(is_own=is_own)
    finally:
        log.setLevel(level)


def _ask_google(*, is_own: bool) -> CloudIdentity:
    import google.auth  # noqa: PLC0415 -- slow to import
    from google.auth.exceptions import (  # noqa: PLC0415
        DefaultCredentialsError,
        GoogleAuthError,
        TransportError,
    )

    request = _quick_request()
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE], request=request)
    except DefaultCredentialsError:
        return CloudIdentity(kind=_GCP_NONE, exists=False)
    except (GoogleAuthError, OSError, ValueError) as error:
        return CloudIdentity(
            kind=f"no working credentials ({type(error).__name__})",
            doubt="the file in GOOGLE_APPLICATION_CREDENTIALS holds no credentials",
            exists=False,
        )
    kind, is_long_lived = _gcp_kind(credentials)
    doubt = ""
    if is_own:
        try:
            credentials.refresh(request)  # type: ignore[no-untyped-call]
        except TransportError:
            doubt = "Google, which issues its tokens, is unreachable"
        except (GoogleAuthError, OSError, ValueError) as error:
            doubt = f"Google gives no token for it ({type(error).__name__})"
    return CloudIdentity(
        kind=kind,
        principal=_gcp_principal(credentials),
        doubt=doubt,
        is_long_lived=is_long_lived,
    )


def _quick_request() -> Any:
    """A transport that waits a second, once for each unreachable machine."""
    from google.auth.exceptions import TransportError  # noqa: PLC0415 -- slow
    from google.auth.transport.requests import Request  # noqa: PLC0415

    transport = Request()
    dead: set[str] = set()

    def ask(url: str, *args: Any, **options: Any) -> Any:
        host = urlsplit(url).netloc
        if host in dead:
            raise TransportError(f"{host} is unreachable")  # type: ignore[no-untyped-call]
        try:
            return transport(url, *args, **{**options, "timeout": QUESTION_SECONDS})
        except TransportError:
            dead.add(host)
            raise

    return ask


def _gcp_kind(credentials: Any) -> tuple[str, bool]:
    """The source of credentials, and whether they are a permanent key."""
    from google.auth import (  # noqa: PLC0415 -- slow to import
        aws,
        compute_engine,
        external_account,
        impersonated_credentials,
    )
    from google.oauth2 import (  # noqa: PLC0415
        credentials as person,
        service_account,
    )

    kinds: tuple[tuple[Any, str, bool], ...] = (
        (compute_engine.Credentials, "the machine's service account", False),
        (aws.Credentials, "workload identity federation of a machine in AWS", False),
        (external_account.Credentials, "workload identity federation", False),
        (
            impersonated_credentials.Credentials,
            "an impersonated service account",
            False,
        ),
        (service_account.Credentials, "a service account's key file", True),
        (person.Credentials, "a person's login", False),
    )
    for known, kind, is_long_lived in kinds:
        if isinstance(credentials, known):
            return kind, is_long_lived
    return type(credentials).__name__, False


def _gcp_principal(credentials: Any) -> str:
    for name in ("service_account_email", "account"):
        found = getattr(credentials, name, None)
        if found and found != "default":
            return str(found)
    return ""
