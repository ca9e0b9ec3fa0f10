"""Google's prices, from SKUs in the form that its catalogue documents."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import refresh_prices
from gcp_prices import (
    KEY,
    KEY_FILE,
    GcpPrices,
    key_of,
)
from support.google_server import Answer, GoogleServer, Request, json_answer

from deploy.fleet import prices
from deploy.fleet.spec import DeploymentFile
from federation.errors import ComputeError, ComputeForbidden, JobError


def spoilt(**changes: Any) -> dict[str, Any]:
    """A core whose price is of another form."""
    row = json.loads(json.dumps(A2[0]))
    rate = row["pricingInfo"][0]["pricingExpression"]["tieredRates"][0]
    rate["unitPrice"] |= changes
    return dict(row)


API_KEY = "AIza-not-a-key-of-anyone-0123456789"
REGION = "us-central1"


def sku(
    description: str,
    dollars: float,
    *,
    usage: str = "OnDemand",
    unit: Any = "h",
    group: str = "CPU",
    regions: tuple[str, ...] = (REGION, "us-east1"),
) -> dict[str, Any]:
    """A SKU as ``services.skus.list`` returns it."""
    units, nanos = divmod(round(dollars * 1e9), 10**9)
    return {
        "name": "services/6F81-5844-456A/skus/0000-1111-2222",
        "skuId": "0000-1111-2222",
        "description": description,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Compute",
            "resourceGroup": group,
            "usageType": usage,
        },
        "serviceRegions": [*regions],
        "pricingInfo": [
            {
                "summary": "",
                "pricingExpression": {
                    "usageUnit": unit,
                    "displayQuantity": 1,
                    "tieredRates": [
                        {
                            "startUsageAmount": 0,
                            "unitPrice": {
                                "currencyCode": "USD",
                                "units": str(units),
                                "nanos": nanos,
                            },
                        }
                    ],
                    "usageUnitDescription": "hour",
                    "baseUnit": "s",
                },
                "currencyConversionRate": 1,
                "effectiveTime": "2026-11-20T00:00:00Z",
            }
        ],
        "serviceProviderName": "Google",
    }


RAM: dict[str, Any] = {"unit": "GiBy.h", "group": "RAM"}
SPOT: dict[str, Any] = {"usage": "Preemptible"}
GPU: dict[str, Any] = {"group": "GPU"}
A2 = [
    sku("A2 Instance Core running in Americas", 0.031611),
    sku("A2 Instance Ram running in Americas", 0.004237, **RAM),
    sku("Nvidia Tesla A100 GPU running in Americas", 2.933908, **GPU),
    sku("Spot Preemptible A2 Instance Core running in Americas", 0.0158, **SPOT),
    sku("Spot Preemptible A2 Instance Ram running in Americas", 0.0021, **RAM, **SPOT),
    sku(
        "Nvidia Tesla A100 GPU attached to Spot Preemptible VMs running in Americas",
        1.44,
        **GPU,
        **SPOT,
    ),
]
# What the texts of others have in common with those.
OTHERS = [
    sku("A2 Instance Core running in Europe", 0.035, regions=("europe-west4",)),
    sku("A2 Custom Instance Core running in Americas", 0.04),
    sku("Commitment v1: A2 Cpu in Americas for 1 Year", 0.02, usage="Commit1Yr"),
    sku("Sole Tenancy Premium for A2 Instance Core running in Americas", 0.003),
    sku("Nvidia Tesla A100 80GB GPU running in Americas", 3.93, **GPU),
    sku("DWS Defined Duration A2 Instance Core running in Americas", 0.02),
]
E2 = [
    sku("E2 Instance Core running in Americas", 0.021811),
    sku("E2 Instance Ram running in Americas", 0.002923, **RAM),
]

Serve = Callable[..., GcpPrices]


@pytest.fixture
def google() -> Iterator[Serve]:
    """The catalogue, two SKUs a page."""
    with ExitStack() as stack:

        def made(skus: list[Any], *, key: str = API_KEY) -> GcpPrices:
            def serve(request: Request) -> Any:
                if request.headers.get("x-goog-api-key") != API_KEY:
                    refusal = {"error": {"code": 403, "status": "PERMISSION_DENIED"}}
                    return replace(json_answer(refusal), status=403)
                assert API_KEY not in request.path
                assert request.path.endswith("/v1/services/6F81-5844-456A/skus")
                assert request.query["currencyCode"] == "USD"
                begin = int(request.query.get("pageToken") or 0)
                page = {"skus": skus[begin : begin + 2], "nextPageToken": ""}
                if begin + 2 < len(skus):
                    page["nextPageToken"] = str(begin + 2)
                return json_answer(page)

            server = stack.enter_context(GoogleServer(serve))
            return GcpPrices(key, server.url)

        yield made


def test_a_machine_is_the_sum_of_its_parts(google: Serve):
    """As in the table of the release, which is from another source."""
    source = google([*OTHERS, *A2, *E2])
    found = source.on_demand("a2-highgpu-1g", REGION)
    assert found == pytest.approx(12 * 0.031611 + 85 * 0.004237 + 2.933908, abs=1e-6)
    assert found == pytest.approx(3.673, rel=1e-3)
    assert source.on_demand("a2-highgpu-2g", REGION) == pytest.approx(2 * found)
    spot = source.spot("a2-highgpu-1g", REGION)
    assert spot == pytest.approx(12 * 0.0158 + 85 * 0.0021 + 1.44, abs=1e-6)
    assert source.on_demand("e2-standard-4", REGION) == pytest.approx(0.13402, abs=1e-4)
    assert source.spot("e2-standard-4", REGION) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "mo"}, "dollars for mo of"),
        ({"dollars": 31.611}, "which no core costs"),
        ({"dollars": 0.0}, "which no core costs"),
        ({"dollars": 0.0000316}, "which no core costs"),
    ],
)
def test_a_part_that_cannot_be_right_is_refused(
    google: Serve, change: dict[str, Any], message: str
):
    """Its sum is never made."""
    row = {"description": A2[0]["description"], "dollars": 0.0316, **change}
    with pytest.raises(ComputeError, match=message):
        google([sku(**row), *A2[1:]]).on_demand("a2-highgpu-1g", REGION)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*A2, sku("A2 Instance Core running in Iowa", 0.05)], "has 2 prices of"),
        (A2[1:], "price of each part"),
        ([spoilt(currencyCode="EUR"), *A2[1:]], "which no core costs"),
        ([spoilt(nanos="many"), *A2[1:]], "of the known form"),
        ([spoilt(nanos=float("nan")), *A2[1:]], "of the known form"),
        ([spoilt(nanos=float("inf")), *A2[1:]], "of the known form"),
        ([spoilt(units=10**400), *A2[1:]], "of the known form"),
        ([sku(A2[0]["description"], 0.03, unit=["h"]), *A2[1:]], "dollars for"),
        ([A2[0] | {"serviceRegions": 3}, *A2[1:]], "no on-demand price"),
        ([A2[0] | {"serviceRegions": f"x{REGION}"}, *A2[1:]], "no on-demand price"),
        ([A2[0] | {"pricingInfo": []}, *A2[1:]], "of the known form"),
        ([3], "of the known form"),
    ],
)
def test_lists_that_leave_a_doubt_are_refused(
    google: Serve, rows: list[Any], message: str
):
    """Two prices, none, or what is none."""
    with pytest.raises(ComputeError, match=message):
        google(rows).on_demand("a2-highgpu-1g", REGION)


def test_a_refused_key_is_no_secret_in_the_error(google: Serve):
    """It says what the key must be allowed."""
    other = "AIza-another-key-0123456789"
    with pytest.raises(ComputeForbidden, match="Cloud Billing API") as found:
        google(A2, key=other).on_demand("a2-highgpu-1g", REGION)
    assert other not in str(found.value)
    assert other not in repr(google(A2, key=other))


def test_the_key_comes_from_the_environment(tmp_path: Path):
    """From a variable, or from a file that one names."""
    path = tmp_path / "key"
    path.write_text(f"{API_KEY}\n")
    path.chmod(0o640)
    with pytest.raises(JobError, match="other users can read") as open_to_others:
        key_of({KEY_FILE: str(path)})
    assert API_KEY not in str(open_to_others.value)
    path.chmod(0o600)
    assert key_of({}) is None
    assert key_of({KEY: API_KEY}) == API_KEY
    assert key_of({KEY_FILE: str(path)}) == API_KEY
    with pytest.raises(JobError, match="holds no API key") as found:
        key_of({KEY: "two words"})
    assert "two words" not in str(found.value)
    with pytest.raises(JobError, match="cannot be read"):
        key_of({KEY_FILE: str(tmp_path / "none")})
    with pytest.raises(JobError, match="not a regular file"):
        key_of({KEY_FILE: str(tmp_path)})


def test_the_key_follows_no_redirect():
    """To another host, or to a later request of the same."""
    seen: list[Request] = []

    def redirect(request: Request) -> Answer:
        seen.append(request)
        return Answer(302, {"Location": "/elsewhere"}, b"")

    with (
        GoogleServer(redirect) as server,
        pytest.raises(ComputeError, match="Google answers 302"),
    ):
        GcpPrices(API_KEY, server.url).on_demand("e2-standard-4", REGION)
    assert len(seen) == 1


class NoAws:
    """A table without machines of AWS asks it for traffic only."""

    def egress(self, _region: str) -> None:
        raise AssertionError


def test_a_table_gets_new_prices_of_google(google: Serve):
    """A price that has changed by more than a factor of three is refused."""
    packaged = prices.load(None, today=date(2026, 6, 20), warn=print)
    names = {"a2-highgpu-1g", "e2-standard-4"}
    rows = tuple(row for row in packaged.machines if row.machine in names)
    old = replace(packaged, machines=rows)
    file = DeploymentFile(name="x", job="j", sites=())
    aws: Any = NoAws()
    today = date(2026, 11, 26)
    found = refresh_prices.refreshed(old, file, aws, google([*A2, *E2]), today=today)
    assert [(row.machine, row.as_of) for row in found.machines] == [
        ("a2-highgpu-1g", "2026-11-26"),
        ("e2-standard-4", "2026-11-26"),
    ]
    assert found.machines[0].gpus == 1
    assert "Cloud Billing" in found.machines[0].source
    cheap = [row | {} for row in A2]
    cheap[2] = sku(cheap[2]["description"], 0.02)
    with pytest.raises(JobError, match="with the cloud's own"):
        refresh_prices.refreshed(old, file, aws, google([*cheap, *E2]), today=today)
