"""Google's discovery documents: which requests an API has, and what bodies hold.

The documents come with ``google-api-python-client``. ``Api`` finds the method that a
request calls, and checks parameters, request bodies and answers against it, so that
a fake service cannot drift from the real one, nor a client from either.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import googleapiclient

_DOCUMENTS = Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"


class NotOfTheApi(Exception):
    """A request or an answer is not what the discovery document allows."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a method of the API.

    Attributes:
        method_id: For example ``storage.objects.get``.
        params: From path and query, decoded.
        is_upload: Whether it came to the method's upload path.
    """

    method_id: str
    params: Mapping[str, str]
    is_upload: bool = False


@dataclass(frozen=True, slots=True)
class _Route:
    http_method: str
    pattern: re.Pattern[str]
    names: tuple[str, ...]
    method: Mapping[str, Any]
    is_upload: bool


class Api:
    """One API, such as ``storage.v1``."""

    def __init__(self, name: str) -> None:
        """Read the document of an API."""
        self._document = json.loads((_DOCUMENTS / f"{name}.json").read_text())
        self._methods = {m["id"]: m for m in _methods(self._document)}
        self._routes = [r for m in self._methods.values() for r in self._routes_of(m)]

    def _routes_of(self, method: Mapping[str, Any]) -> list[_Route]:
        paths = [(self._document["servicePath"] + method["path"], False)]
        if method.get("supportsMediaDownload"):
            paths.append(("download/" + paths[0][0], False))
        protocols = method.get("mediaUpload", {}).get("protocols", {})
        paths += [(p["path"].lstrip("/"), True) for p in protocols.values()]
        return [_route(method, path, is_upload=upload) for path, upload in paths]

    def call(self, http_method: str, path: str, query: Mapping[str, str]) -> Call:
        """Find the method that a request calls, and check its parameters.

        Args:
            http_method: ``GET`` and so on.
            path: As it came, encoded, with its first slash.
            query: Decoded.

        Raises:
            NotOfTheApi: There is no such method or parameter, or a value is malformed.
        """
        for route in self._routes:
            found = route.pattern.fullmatch(path.lstrip("/"))
            if found is None or route.http_method != http_method:
                continue
            values = map(unquote, found.groups())
            params = {**query, **dict(zip(route.names, values, strict=True))}
            self._check_params(route, params)
            return Call(route.method["id"], params, route.is_upload)
        raise NotOfTheApi(f"{http_method} {path} is no method of the API")

    def _check_params(self, route: _Route, params: Mapping[str, str]) -> None:
        allowed = {**self._document["parameters"], **route.method.get("parameters", {})}
        if route.is_upload:
            allowed["upload_id"] = {"type": "string"}
        for name, value in params.items():
            if name not in allowed:
                raise NotOfTheApi(f"{route.method['id']} has no parameter {name!r}")
            _check_text(allowed[name], value, name)
        for name, schema in allowed.items():
            # An upload may have the object's name in its metadata.
            if schema.get("required") and name not in params:
                raise NotOfTheApi(f"{route.method['id']} needs {name!r}")

    def check_request(self, method_id: str, body: Any) -> None:
        """Check the JSON of a request.

        Raises:
            NotOfTheApi: The method does not take it.
        """
        self._check_against("request", method_id, body)

    def check_answer(self, method_id: str, body: Any) -> None:
        """Check the JSON of an answer.

        Raises:
            NotOfTheApi: The method does not answer so.
        """
        self._check_against("response", method_id, body)

    def _check_against(self, side: str, method_id: str, body: Any) -> None:
        schema = self._methods[method_id].get(side)
        if schema is not None:
            self._check(schema, body, f"{side} of {method_id}")
        elif body not in (None, {}):
            raise NotOfTheApi(f"{method_id} has no {side}")

    def _check(self, schema: Mapping[str, Any], value: Any, where: str) -> None:
        if "$ref" in schema:
            schema = self._document["schemas"][schema["$ref"]]
        kind = schema.get("type", "any")
        if kind == "any":
            return
        if not isinstance(value, _PYTHON[kind]) or (
            isinstance(value, bool) and kind != "boolean"
        ):
            raise NotOfTheApi(f"{where} is {value!r}, not of type {kind}")
        if kind == "array":
            for index, item in enumerate(value):
                self._check(schema["items"], item, f"{where}[{index}]")
        elif kind == "object":
            self._check_object(schema, value, where)
        elif kind == "string":
            _check_text(schema, value, where)

    def _check_object(
        self, schema: Mapping[str, Any], value: Mapping[str, Any], where: str
    ) -> None:
        properties = schema.get("properties", {})
        for name, item in value.items():
            item_schema = properties.get(name, schema.get("additionalProperties"))
            if item_schema is None:
                raise NotOfTheApi(f"{where} has no field {name!r}")
            self._check(item_schema, item, f"{where}.{name}")


_PYTHON: Mapping[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def _methods(resource: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = list(resource.get("methods", {}).values())
    for child in resource.get("resources", {}).values():
        found += _methods(child)
    return found


def _route(method: Mapping[str, Any], path: str, *, is_upload: bool) -> _Route:
    pattern, names, end = "", [], 0
    for found in re.finditer(r"\{(\+?)(\w+)\}", path):
        pattern += re.escape(path[end : found.start()])
        # {+name} spans segments; the parameter's own pattern says which.
        inner = method["parameters"][found[2]].get("pattern", ".+")
        inner = inner.removeprefix("^").removesuffix("$")
        pattern += f"({inner})" if found[1] else "([^/]+)"
        names.append(found[2])
        end = found.end()
    pattern += re.escape(path[end:])
    return _Route(
        method["httpMethod"], re.compile(pattern), tuple(names), method, is_upload
    )


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except binascii.Error:
        return False
    return True


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None


_FORMATS: Mapping[str, Callable[[str], bool]] = {
    "byte": _is_base64,
    "date-time": _is_time,
    "int32": _is_integer,
    "int64": _is_integer,
    "uint32": str.isdecimal,
    "uint64": str.isdecimal,
}


def _check_text(schema: Mapping[str, Any], text: str, where: str) -> None:
    """Check a string, or another type's form in a URL."""
    possible = schema.get("enum")
    if schema.get("type") == "boolean":
        possible = ["true", "false", "True", "False"]
    if possible is not None and text not in possible:
        raise NotOfTheApi(f"{where} is {text!r}, none of {possible}")
    check = _FORMATS.get(schema.get("format", ""))
    if check is not None and not check(text):
        raise NotOfTheApi(f"{where} is {text!r}, not of format {schema['format']}")
