"""List prices of Google's machines, added up from what their parts cost.

Source: Cloud Billing Catalog API, v1, ``services.skus.list`` of Compute Engine
(services/6F81-5844-456A). Google prices a machine's cores, memory and GPUs apart, so a
machine is the sum of its SKUs. Their texts are the only place that names a family of
machines, so each is matched whole, and a part that is missing, priced twice or out of
bounds is an error and no price. Answers are checked like anything from the network.
"""

import http.client
import json
import os
import re
import stat
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from federation.errors import ComputeError, ComputeForbidden, JobError

# Variables of the environment: a command line is seen by others.
KEY, KEY_FILE = "CROSSFED_GOOGLE_API_KEY", "CROSSFED_GOOGLE_API_KEY_FILE"
URL = "https://cloudbilling.googleapis.com"
_SERVICE = "6F81-5844-456A"  # Compute Engine.
_PAGE, _MOST_PAGES, _MOST_BYTES = 5000, 20, 64 << 20
_SECONDS = 60.0
_SHOWN = 80  # Characters of what Google states.
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST_KEY_BYTES = 1 << 10
_NANO = 1e9
_DEMAND, _SPOT = "OnDemand", "Preemptible"
# Dollars an hour that no part is below or above, in any region, on demand or spot.
_BOUNDS = {"core": (0.001, 0.2), "ram": (0.0001, 0.03), "gpu": (0.01, 20.0)}
_UNITS = {"core": {"h"}, "ram": {"GiBy.h", "GBy.h"}, "gpu": {"h"}}
# How texts name the parts of a family of machines: its cores, its memory.
_FAMILIES = {
    "e2": "E2 Instance",
    "n2": "N2 Instance",
    "n2d": "N2D AMD Instance",
    "g2": "G2 Instance",
    "a2": "A2 Instance",
    "a3": "A3 Instance",
}
# How they name GPUs, by the names of the price table.
_GPUS = {
    "L4": "Nvidia L4 GPU",
    "A100-40GB": "Nvidia Tesla A100 GPU",
    "A100-80GB": "Nvidia Tesla A100 80GB GPU",
    "H100": "Nvidia H100 80GB GPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a machine is made of.

    Attributes:
        cpus: Virtual CPUs.
        memory_gb: Memory, in GiB.
        gpus: Number of GPUs.
        gpu: Their model, as the price table names it.
    """

    cpus: float
    memory_gb: float
    gpus: int = 0
    gpu: str = ""


# Parts of types that are no plain multiple of a core, as Google documents them.
_GIB_PER_CPU = {"standard": 4.0, "highmem": 8.0}
_TYPES = {
    "a2-highgpu": Parts(cpus=12, memory_gb=85, gpus=1, gpu="A100-40GB"),
    "a2-ultragpu": Parts(cpus=12, memory_gb=170, gpus=1, gpu="A100-80GB"),
    "a3-highgpu": Parts(cpus=26, memory_gb=234, gpus=1, gpu="H100"),
}
_L4S = {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}


def parts_of(machine: str) -> Parts:
    """Return the parts of a type of machine.

    Raises:
        ComputeError: Its parts are not known here.
    """
    found = find_parts(machine)
    if found is None:
        raise ComputeError(
            f"the parts of {machine} are not known, so Google's prices cannot be added "
            "up: state its price in your table"
        )
    return found


def find_parts(machine: str) -> Parts | None:
    """Return the parts of a type of machine; None if they are not known here."""
    found = re.fullmatch(r"([a-z0-9]+-[a-z]+)-([0-9]{1,3})(g?)", machine)
    if found:
        kind, number, is_gpus = found[1], int(found[2]), found[3] == "g"
        family, _, shape = kind.partition("-")
        one = _TYPES.get(kind)
        if one is not None and is_gpus:
            return Parts(
                cpus=one.cpus * number,
                memory_gb=one.memory_gb * number,
                gpus=number,
                gpu=one.gpu,
            )
        if kind == "g2-standard" and number in _L4S and not is_gpus:
            return Parts(
                cpus=number, memory_gb=4.0 * number, gpus=_L4S[number], gpu="L4"
            )
        is_plain = family in {"e2", "n2", "n2d"} and shape in _GIB_PER_CPU
        if is_plain and not is_gpus:
            return Parts(cpus=number, memory_gb=_GIB_PER_CPU[shape] * number)
    return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the key would go with it, to whatever host it names."""

    def redirect_request(self, *_: object) -> None:
        """Follow none."""


_OPENER = urllib.request.build_opener(_NoRedirect)


@dataclass(eq=False)
class GcpPrices:
    """Asks Google for its prices.

    Attributes:
        key: An API key for the Cloud Billing API.
        url: URL of the service.
    """

    key: str = field(repr=False)
    url: str = URL
    _skus: Sequence[Mapping[str, Any]] | None = field(default=None, init=False)

    def on_demand(self, machine: str, region: str) -> float:
        """Dollars of an hour of a machine.

        Raises:
            ComputeError: Google has not exactly one price of each of its parts, or
                cannot be asked.
        """
        found = self._sum(machine, region, _DEMAND)
        if found is None:
            raise ComputeError(
                f"Google has no on-demand price of each part of {machine} in {region}: "
                "check region and type"
            )
        return found

    def spot(self, machine: str, region: str) -> float | None:
        """Dollars of an hour of a spot machine; None if a part has no such price.

        Raises:
            ComputeError: As for ``on_demand``.
        """
        return self._sum(machine, region, _SPOT)

    def _sum(self, machine: str, region: str, usage: str) -> float | None:
        parts, family = parts_of(machine), machine.partition("-")[0]
        name = _FAMILIES[family]
        wanted = [("core", f"{name} Core", parts.cpus)]
        wanted.append(("ram", f"{name} Ram", parts.memory_gb))
        if parts.gpus:
            wanted.append(("gpu", _GPUS[parts.gpu], float(parts.gpus)))
        prices = [self._part(k, text, region, usage) for k, text, _ in wanted]
        dollars = 0.0
        for price, (_, _, number) in zip(prices, wanted, strict=True):
            if price is None:
                return None
            dollars += price * number
        return round(dollars, 6)

    def _part(self, kind: str, text: str, region: str, usage: str) -> float | None:
        """Find the price of a part; None if there is none."""
        lead = "Spot Preemptible " if usage == _SPOT else ""
        tail = " attached to Spot Preemptible VMs" if usage == _SPOT else ""
        begin = f"{text}{tail}" if kind == "gpu" else f"{lead}{text}"
        place = " running in [A-Za-z ()-]+"
        pattern = re.compile(re.escape(begin) + place, re.IGNORECASE)
        found = {
            _price(sku, kind)
            for sku in self._all()
            if _usage(sku) == usage
            and region in _regions(sku)
            and pattern.fullmatch(str(sku.get("description", "")))
        }
        if len(found) > 1:
            raise ComputeError(
                f"Google has {len(found)} prices of {begin!r} in {region}, where one "
                "was expected: state the machine's price in your table"
            )
        return next(iter(found), None)

    def _all(self) -> Sequence[Mapping[str, Any]]:
        if self._skus is None:
            self._skus = [*self._pages()]
        return self._skus

    def _pages(self) -> Iterator[Mapping[str, Any]]:
        token = ""
        for _ in range(_MOST_PAGES):
            page = self._asked(token)
            skus = page.get("skus")
            if not isinstance(skus, list) or not all(isinstance(s, dict) for s in skus):
                raise ComputeError("Google's price list is not of the known form")
            yield from skus
            token = page.get("nextPageToken", "")
            if not token:
                return
        raise ComputeError(f"Google's price list has more than {_MOST_PAGES} pages")

    def _asked(self, token: str) -> Mapping[str, Any]:
        query = {"currencyCode": "USD", "pageSize": str(_PAGE), "pageToken": token}
        path = f"/v1/services/{_SERVICE}/skus?{urllib.parse.urlencode(query)}"
        # In a header: a URL is logged.
        request = urllib.request.Request(  # noqa: S310 -- of this module
            self.url + path, headers={"X-Goog-Api-Key": self.key}
        )
        doing = "read Google's prices (cloudbilling services.skus.list)"
        try:
            with _OPENER.open(request, timeout=_SECONDS) as answer:
                found = json.loads(answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in {400, 401, 403}:
                raise ComputeForbidden(
                    f"cannot {doing}: Google answers {error.code}. Make an API key "
                    "that may use the Cloud Billing API, and enable it in its project"
                ) from None
            raise ComputeError(f"cannot {doing}: Google answers {error.code}") from None
        except (
            OSError,
            ValueError,
            RecursionError,
            http.client.HTTPException,
        ) as error:
            raise ComputeError(f"cannot {doing}: {error}") from error
        if not isinstance(found, dict):
            raise ComputeError("Google's price list is not of the known form")
        return found


def _usage(sku: Mapping[str, Any]) -> object:
    category = sku.get("category")
    return category.get("usageType") if isinstance(category, dict) else None


def _regions(sku: Mapping[str, Any]) -> Sequence[object]:
    found = sku.get("serviceRegions")
    return found if isinstance(found, list) else ()


def _price(sku: Mapping[str, Any], kind: str) -> float:
    """Dollars an hour of one core, GiB or GPU.

    Raises:
        ComputeError: Its form or unit is unknown, or no part of that kind costs that.
    """
    try:
        (info,) = sku["pricingInfo"]
        expression = info["pricingExpression"]
        unit, rates = str(expression["usageUnit"]), expression["tieredRates"]
        (rate,) = rates  # From the first hour on.
        money = rate["unitPrice"]
        dollars = int(money.get("units") or 0) + int(money.get("nanos") or 0) / _NANO
        is_sound = (
            money["currencyCode"] == "USD" and float(rate["startUsageAmount"]) == 0
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ComputeError(
            f"Google's price of {sku.get('description')!r:.80} is not of the known "
            f"form: {error!r}"
        ) from error
    low, high = _BOUNDS[kind]
    if not (is_sound and unit in _UNITS[kind] and low <= dollars <= high):
        raise ComputeError(
            f"Google states {dollars} dollars for {unit[:_SHOWN]} of "
            f"{sku.get('description')!r:.80}, which no {kind} costs: compare it with "
            "Google's own page, and state the machine's price in your table"
        )
    return dollars


def key_of(environment: Mapping[str, str]) -> str | None:
    """Read the API key, from a variable or the file that another one names.

    Returns:
        None if there is neither.

    Raises:
        JobError: It is none, or the file cannot be read or is open to others.
    """
    path, where = environment.get(KEY_FILE), KEY
    key = environment.get(KEY)
    if path is not None:
        where = KEY_FILE
        try:
            key = _read_private(Path(path))
        except OSError as error:
            raise JobError(f"cannot be read: {error}", key=where) from error
    if key is None:
        return None
    key = key.strip()
    if not re.fullmatch(r"[\x21-\x7e]{20,200}", key):
        raise JobError("holds no API key of Google", key=where)
    return key


def _read_private(path: Path) -> str:
    # O_NONBLOCK: a pipe in the file's place must not hang.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise JobError(f"{path} is not a regular file", key=KEY_FILE)
        if mode & _OTHERS:
            raise JobError(
                f"other users can read {path} (mode {stat.S_IMODE(mode):04o}): close "
                f"it with chmod 600 {path}",
                key=KEY_FILE,
            )
        return os.read(handle, _MOST_KEY_BYTES).decode("ascii", "replace")
    finally:
        os.close(handle)
