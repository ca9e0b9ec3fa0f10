"""A new price table from a cloud's own lists, as recorded."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import boto3
import check_release
import pytest
import refresh_prices
from aws_prices import AwsPrices
from botocore.stub import ANY, Stubber

from deploy.fleet import prices
from deploy.fleet.machine_spec import CloudMachine, SiteMachine
from deploy.fleet.spec import DeploymentFile
from federation.errors import ComputeError, JobError

TODAY = date(2026, 11, 23)
CREDENTIALS = {"aws_access_key_id": "x", "aws_secret_access_key": "y"}
OLD = replace(
    prices.load(None, today=date(2026, 6, 20), warn=print),
    machines=tuple(
        row
        for row in prices.load(None, today=date(2026, 6, 20), warn=print).machines
        if row.machine in {"g5.xlarge", "a2-highgpu-1g"}
    ),
)
FILE = DeploymentFile(
    name="x",
    job="j",
    sites=(
        SiteMachine(
            name="a",
            provider="aws",
            machine=CloudMachine(region="eu-west-1", type="g6.xlarge"),
        ),
    ),
)


def product(*dimensions: tuple[str, str, str, str]) -> str:
    """A product of AmazonEC2 as AWS lists it: unit, begin, end, dollars."""
    return json.dumps(
        {
            "product": {"sku": "ABC"},
            "terms": {
                "OnDemand": {
                    "ABC.JRTCKXETXF": {
                        "priceDimensions": {
                            f"ABC.JRTCKXETXF.{index}": {
                                "unit": unit,
                                "beginRange": begin,
                                "endRange": end,
                                "pricePerUnit": {"USD": dollars},
                            }
                            for index, (unit, begin, end, dollars) in enumerate(
                                dimensions
                            )
                        }
                    }
                }
            },
            "publicationDate": "2026-11-20T00:00:00Z",
        }
    )


HOUR = ("Hrs", "0", "Inf")
TRAFFIC = product(
    ("GB", "0", "10240", "0.0900000000"),
    ("GB", "10240", "51200", "0.0850000000"),
    ("GB", "51200", "Inf", "0.0700000000"),
)


@pytest.fixture
def aws() -> Callable[..., AwsPrices]:
    def made(
        products: list[str], spots: list[list[tuple[str, str]]], error: str = ""
    ) -> AwsPrices:
        pricing = boto3.client("pricing", region_name="us-east-1", **CREDENTIALS)
        stub = Stubber(pricing)
        for text in products:
            asked = {
                "ServiceCode": ANY,
                "Filters": ANY,
                "FormatVersion": "aws_v1",
                "MaxResults": 100,
            }
            stub.add_response("get_products", {"PriceList": [text]}, asked)
        if error:
            stub.add_client_error("get_products", error)
        stub.activate()
        ec2 = boto3.client("ec2", region_name="us-east-1", **CREDENTIALS)
        second = Stubber(ec2)
        for rows in spots:
            history = [
                {
                    "AvailabilityZone": zone,
                    "SpotPrice": price,
                    "Timestamp": datetime(2026, 11, 23, hour, tzinfo=UTC),
                }
                for hour, (zone, price) in enumerate(rows)
            ]
            second.add_response(
                "describe_spot_price_history", {"SpotPriceHistory": history}
            )
        second.activate()
        return AwsPrices(pricing=pricing, ec2_of=lambda _region: ec2)

    return made


@pytest.mark.slow
def test_a_table_is_refreshed(aws: Callable[..., AwsPrices], tmp_path: Path):
    """And read again: what was not asked for keeps its day, which still counts."""
    source = aws(
        [product((*HOUR, "1.2060000000")), product((*HOUR, "0.8048")), TRAFFIC],
        # The newest of each zone; the median of zones. A spot price above the other
        # is left out.
        [[("a", "0.9"), ("a", "0.5"), ("b", "0.4"), ("c", "0.6")], [("a", "0.9")]],
    )
    found = refresh_prices.refreshed(OLD, FILE, source, today=TODAY)
    path = tmp_path / "prices.toml"
    refresh_prices.write(found, path)
    told: list[str] = []
    assert prices.load(path, today=TODAY, warn=told.append) == found
    assert "159 days old" in told[0]  # Those of gcp.
    prices.load(path, today=TODAY, warn=pytest.fail, clouds={"aws"})
    assert found.as_of == "2026-11-23"
    one, other, gcp = found.machines
    assert (one.machine, one.on_demand, one.spot) == ("g5.xlarge", 1.206, 0.5)
    assert (other.region, other.on_demand, other.spot) == ("eu-west-1", 0.8048, None)
    assert (gcp.provider, gcp.as_of) == ("gcp", "2026-06-17")
    tiers = [(tier.up_to, tier.dollars) for tier in found.egress[0].tiers]
    assert tiers == [(100.0, 0.0), (10240.0, 0.09), (51200.0, 0.085), (None, 0.07)]
    assert found.egress[1] == replace(OLD.egress[1], as_of="2026-06-17")


@pytest.mark.parametrize(
    ("products", "message"),
    [
        ([product((*HOUR, "10.06"))], "was 1.006 dollars and is 10.06"),
        ([product((*HOUR, "1.0"), (*HOUR, "1.1"))], "has 2 on-demand prices"),
        ([product()], "has 0 on-demand prices"),
        (['{"terms": 3}'], "of the known form"),
        ([product((*HOUR, "NaN"))], "states a price of NaN"),
    ],
)
def test_prices_that_cannot_be_right_are_refused(
    aws: Callable[..., AwsPrices], products: list[str], message: str
):
    """Nothing is written then."""
    source: Any = aws(products, [[("a", "0.4")]])
    with pytest.raises((JobError, ComputeError), match=message):
        refresh_prices.refreshed(OLD, FILE, source, today=TODAY)


def test_a_release_has_prices_that_somebody_has_compared(
    capsys: pytest.CaptureFixture[str],
):
    """Whoever builds for themselves is told; a release is not built at all."""
    day = datetime.fromisoformat(prices.load(None, today=TODAY, warn=print).as_of)
    made = day.replace(tzinfo=UTC).timestamp()
    last, late = made + 90 * 86400, made + 92 * 86400
    assert check_release.main("https://x", today=last) == 0
    assert capsys.readouterr().err == ""
    assert check_release.main("", today=late) == 0
    assert check_release.main("https://x", today=late) == 1
    assert capsys.readouterr().err.count("92 days old") == 2
