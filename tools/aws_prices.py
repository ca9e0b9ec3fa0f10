"""List prices of AWS: machines on demand and on spot, and traffic to the internet.

Sources: AWS Price List Query API, ``GetProducts`` of AmazonEC2 and AWSDataTransfer;
EC2, ``DescribeSpotPriceHistory``. Prices come as JSON in text, and are checked like
anything from the network.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from botocore.config import Config

from cloud_adapters.compute.ec2_errors import FAILURES, translate
from cloud_adapters.net import aws_session
from federation.errors import ComputeError

# The service has three endpoints, and answers for all regions.
_PRICING_REGION = "us-east-1"
_GB = "GB"
_MOST_PRODUCTS = 100
_MACHINE = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficTier:
    """Price of a part of a month's traffic to the internet.

    Attributes:
        up_to: Where it ends, in GB; None for the last.
        dollars: Dollars per GB.
    """

    up_to: float | None
    dollars: float


@dataclass(frozen=True, kw_only=True)
class AwsPrices:
    """Asks AWS for its prices.

    Attributes:
        pricing: A boto3 client of ``pricing``.
        ec2_of: Makes a boto3 client of ``ec2`` for a region.
    """

    pricing: Any
    ec2_of: Any

    def on_demand(self, machine: str, region: str) -> float:
        """Dollars of an hour of a machine with Linux.

        Raises:
            ComputeError: AWS has not exactly one such price, or cannot be asked.
        """
        where = {"instanceType": machine, "regionCode": region, **_MACHINE}
        found = self._dimensions("AmazonEC2", where)
        prices: set[float] = {each["dollars"] for each in found} - {0.0}
        if len(prices) != 1:
            raise ComputeError(
                f"AWS has {len(prices)} on-demand prices of {machine} in {region}, "
                "where one was expected: check region and type"
            )
        return prices.pop()

    def spot(self, machine: str, region: str) -> float | None:
        """Median over zones of a spot machine's hour now; None if there is none.

        Raises:
            ComputeError: AWS cannot be asked, or answers what is no price.
        """
        newest: dict[str, tuple[Any, float]] = {}
        ec2 = self.ec2_of(region)
        answer = _asked(
            "read spot prices (ec2:DescribeSpotPriceHistory)",
            ec2.describe_spot_price_history,
            InstanceTypes=[machine],
            ProductDescriptions=["Linux/UNIX"],
            MaxResults=_MOST_PRODUCTS,
        )
        for row in answer.get("SpotPriceHistory", ()):
            zone, at = row["AvailabilityZone"], row["Timestamp"]
            if zone not in newest or at > newest[zone][0]:
                newest[zone] = (at, _number(row["SpotPrice"]))
        return median(price for _, price in newest.values()) if newest else None

    def egress(self, region: str) -> tuple[TrafficTier, ...]:
        """Tiers of a month's traffic from a region to the internet.

        The part that is free in every account is in no price list.

        Raises:
            ComputeError: AWS has no such prices, or cannot be asked.
        """
        where = {
            "fromRegionCode": region,
            "transferType": "AWS Outbound",
            "toLocation": "External",
        }
        found = [
            (each["begin"], each["end"], each["dollars"])
            for each in self._dimensions("AWSDataTransfer", where)
            if each["unit"] == _GB
        ]
        tiers = sorted(set(found))
        ends = [end for _, end, _ in tiers]
        begins = [begin for begin, _, _ in tiers]
        if not tiers or begins != [0.0, *ends[:-1]] or ends[-1] is not None:
            raise ComputeError(
                f"AWS's prices of traffic from {region} are no tiers from 0 without "
                "gaps: look at them, and state them in your table"
            )
        return tuple(TrafficTier(up_to=end, dollars=price) for _, end, price in tiers)

    def _dimensions(
        self, service: str, where: Mapping[str, str]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield unit, range and dollars of every on-demand price of products."""
        filters = [
            {"Type": "TERM_MATCH", "Field": name, "Value": value}
            for name, value in where.items()
        ]
        answer = _asked(
            f"read prices of {service} (pricing:GetProducts)",
            self.pricing.get_products,
            ServiceCode=service,
            Filters=filters,
            FormatVersion="aws_v1",
            MaxResults=_MOST_PRODUCTS,
        )
        if answer.get("NextToken"):
            raise ComputeError(f"AWS has too many prices of {service} for {where}")
        for text in answer["PriceList"]:
            yield from _parsed(text, service)


def _parsed(text: str, service: str) -> Iterator[Mapping[str, Any]]:
    try:
        offers = json.loads(text)["terms"].get("OnDemand", {})
        for offer in offers.values():
            for each in offer["priceDimensions"].values():
                end = each["endRange"]
                yield {
                    "unit": each["unit"],
                    "begin": float(each["beginRange"]),
                    "end": None if end == "Inf" else float(end),
                    "dollars": _number(each["pricePerUnit"]["USD"]),
                }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ComputeError(
            f"AWS's price list of {service} is not of the known form: {error!r}"
        ) from error


def _number(text: str) -> float:
    number = float(text)
    if not 0.0 <= number < float("inf"):
        raise ComputeError(f"AWS states a price of {text}")
    return number


def _asked(doing: str, ask: Any, **arguments: Any) -> Any:
    try:
        return ask(**arguments)
    except FAILURES as error:
        raise translate(error, doing) from error


def connect() -> AwsPrices:
    """Open the services with the environment's credentials."""
    config = Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 5},
        user_agent_extra="crossfed",
    )
    session = aws_session.new_session()

    def ec2_of(region: str) -> Any:
        return session.client("ec2", region_name=region, config=config)

    pricing = session.client("pricing", region_name=_PRICING_REGION, config=config)
    return AwsPrices(pricing=pricing, ec2_of=ec2_of)
