"""An EC2 on loopback: moto's, and what Amazon's does but moto does not.

Added here: tokens, of which each launches one instance at most, and with the parameters
of its first request only; and refusals that a test asks for.
"""

import contextlib
import io
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from support import s3_server
from support.s3_server import ACCOUNT, REGION, App

from cloud_adapters.compute.ec2 import Ec2Pool
from federation.clock import VirtualClock

# One that moto knows.
IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
ZONES = ("us-east-1a", "us-east-1b")

Form = Mapping[str, str]


class Ec2Server:
    """A running server.

    Attributes:
        url: Where it is.
        enforce_policies: As ``S3Server.enforce_policies``.
        refusal: Given a request, the code to refuse it with; None lets it pass.
        loses: Given a request, whether to carry it out and answer with a failure.
        is_blind: Whether it lists no instance, as it does for seconds after a launch.
        requests: Forms that were sent.
        prices: Of every type of spot machine: zone, time and dollars, the oldest first;
            without any, moto's answer counts, which is one price.
    """

    def __init__(self) -> None:
        self.url = ""
        self.enforce_policies: Callable[..., None] = lambda **_: None
        self.refusal: Callable[[Form], str | None] = lambda _: None
        self.loses: Callable[[Form], bool] = lambda _: False
        self.is_blind = False
        self.requests: list[Form] = []
        self.prices: list[tuple[str, str, str]] = []
        self._launched: dict[str, tuple[Form, bytes]] = {}
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget every instance: moto lists those that have ended for ever."""
        from moto.ec2.models import ec2_backends  # noqa: PLC0415 (seconds to import)

        backend = ec2_backends[ACCOUNT][REGION]
        backend.reset()
        # As accounts have it that start machines without public addresses.
        subnet = next(iter(backend.describe_subnets()))
        nat = backend.create_nat_gateway(subnet.id, allocation_id=None)
        (table,) = backend.describe_route_tables(filters={"vpc-id": [subnet.vpc_id]})
        backend.create_route(table.id, "0.0.0.0/0", nat_gateway_id=nat.id)
        self.mend()
        self.requests.clear()
        self.prices.clear()
        self._launched.clear()

    def pool(self, **options: Any) -> Ec2Pool:
        """A pool of the only region."""
        # Making a client takes long.
        self._clients = self._clients or {
            name: s3_server.client(self.url, service=name) for name in ("ec2", "ssm")
        }
        given = {"region": REGION, "clock": VirtualClock(), **self._clients}
        return Ec2Pool(**{**given, **options})

    def make_profile(self, name: str) -> None:
        """Make an instance profile, once."""
        iam = s3_server.client(self.url, service="iam")
        found = iam.list_instance_profiles()["InstanceProfiles"]
        if name not in {each["InstanceProfileName"] for each in found}:
            iam.create_instance_profile(InstanceProfileName=name)

    def launches(self) -> list[Form]:
        """Launches that were asked for."""
        return [form for form in self.requests if form["Action"] == "RunInstances"]

    def front(self, app: App) -> App:
        """Put what moto lacks before it."""

        def serve(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
            form = dict(parse_qsl(body.decode(errors="replace")))
            if "Action" not in form:
                return app(environ, start)
            with self._lock:
                self.requests.append(form)
                code = self.refusal(form)
                if code is not None:
                    return _refuse(start, code)
                if form["Action"] == "DescribeInstances" and self.is_blind:
                    start("200 OK", [("Content-Type", "text/xml")])
                    return [b"<Response><reservationSet/></Response>"]
                heads: list[tuple[Any, ...]] = []

                def keep(*head: Any) -> None:
                    heads.append(head)

                answer = list(self._answer(form, app, environ, keep))
                if self.loses(form):
                    return _refuse(start, "Unavailable")
                start(*heads[0])
                return answer

        return serve

    def mend(self) -> None:
        """Serve as it should."""
        self.refusal = lambda _: None
        self.loses = lambda _: False
        self.is_blind = False

    def cut(self, number: int, when: str) -> Callable[[], bool]:
        """Fail one of the next requests, ``before`` or ``after`` it is carried out.

        Returns:
            Tells whether that has happened.
        """
        counted = itertools.count(1)
        reached: list[bool] = []

        def is_it(_: Form) -> bool:
            found = next(counted) == number
            reached.extend([True] * found)
            return found

        if when == "before":
            self.refusal = lambda form: "Unavailable" if is_it(form) else None
        else:
            self.loses = is_it
        return lambda: bool(reached)

    def _answer(
        self, form: Form, app: App, environ: dict[str, Any], start: Any
    ) -> Iterable[bytes]:
        if form["Action"] == "DescribeSpotPriceHistory" and self.prices:
            start("200 OK", [("Content-Type", "text/xml")])
            return [_history(form, self.prices)]
        if form["Action"] != "RunInstances":
            return app(environ, start)
        token = form["ClientToken"]
        if token not in self._launched:
            heads: list[tuple[Any, ...]] = []
            made = b"".join(app(environ, lambda *head: heads.append(head)))
            if heads[0][0].startswith("200"):
                self._launched[token] = (form, made)
            start(*heads[0])
            return [made]
        before, answer = self._launched[token]
        if before != form:
            return _refuse(start, "IdempotentParameterMismatch")
        if self._has_ended(answer):
            return _refuse(start, "IdempotentInstanceTerminated")
        start("200 OK", [("Content-Type", "text/xml")])
        return [answer]

    def _has_ended(self, answer: bytes) -> bool:
        from moto.ec2.models import ec2_backends  # noqa: PLC0415 (seconds to import)

        name = answer.partition(b"<instanceId>")[2].partition(b"<")[0].decode()
        state: str = ec2_backends[ACCOUNT][REGION].get_instance(name).state
        return state == "terminated"


@contextlib.contextmanager
def serve() -> Iterator[Ec2Server]:
    """Run a server until the end of the block."""
    made = Ec2Server()
    with s3_server.serve(before=made.front) as server:
        made.url = server.url
        made.enforce_policies = server.enforce_policies
        yield made


def _history(form: Form, prices: Sequence[tuple[str, str, str]]) -> bytes:
    """The newest price before the asked time and all later ones, in pages of two.

    Source: EC2 API reference, DescribeSpotPriceHistory.
    """
    zones = {v for n, v in form.items() if re.fullmatch(r"Filter\.1\.Value\.\d+", n)}
    since = form["StartTime"][:19]
    rows = [each for each in prices if not zones or each[0] in zones]
    held = {zone: (zone, at, price) for zone, at, price in rows if at[:19] <= since}
    # The newest come first.
    rows = [*held.values(), *(each for each in rows if each[1][:19] > since)][::-1]
    begin = int(form.get("NextToken") or 0)
    items = "".join(
        f"<item><instanceType>{form['InstanceType.1']}</instanceType>"
        f"<productDescription>Linux/UNIX</productDescription>"
        f"<spotPrice>{price}</spotPrice><timestamp>{at}</timestamp>"
        f"<availabilityZone>{zone}</availabilityZone></item>"
        for zone, at, price in rows[begin : begin + 2]
    )
    more = str(begin + 2) if begin + 2 < len(rows) else ""
    answer = f"<spotPriceHistorySet>{items}</spotPriceHistorySet>"
    return f"<Response>{answer}<nextToken>{more}</nextToken></Response>".encode()


def _refuse(start: Any, code: str) -> Iterable[bytes]:
    status = "503 Service Unavailable" if code == "Unavailable" else "400 Bad Request"
    start(status, [("Content-Type", "text/xml")])
    error = f"<Error><Code>{escape(code)}</Code><Message>told by a test</Message>"
    return [f"<Response><Errors>{error}</Error></Errors></Response>".encode()]
