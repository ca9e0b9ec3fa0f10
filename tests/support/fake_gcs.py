"""Google Cloud Storage on loopback: its JSON API, as far as clients use it.

Generations, preconditions, checksums, ranges, pages and resumable uploads
behave as Google documents them; requests and answers are checked against the
discovery document. Not here: versioning, ACLs, holds, batches, and the XML API except
for signed URLs.
"""

import base64
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import google_crc32c
from support.google_discovery import Api, Call, NotOfTheApi
from support.google_server import (
    Answer,
    GoogleError,
    GoogleServer,
    Request,
    json_answer,
)

KIB_256 = 256 * 1024  # Every chunk but the last is a multiple of this.
Resource = dict[str, Any]
Params = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stored:
    """An object: its content and what the API says of it."""

    content: bytes
    resource: Resource


@dataclass(slots=True)
class Upload:
    """A resumable upload.

    Attributes:
        bucket: Where the object will be.
        resource: What the client said of it.
        params: With the conditions.
        content: What has arrived.
        answer: What the last chunk was told; None before it.
    """

    bucket: str
    resource: Resource
    params: Params
    content: bytearray = field(default_factory=bytearray)
    answer: Answer | None = None


class FakeGcs(GoogleServer):
    """The service, with the buckets it begins with.

    Attributes:
        kept_at_once: Bytes of a chunk that an upload keeps at most.
        max_page: Objects in a page of a listing.
        allows: Whether the caller has a permission such as ``storage.objects.get``
            on a bucket and an object; of listings, on a bucket and a prefix.
    """

    def __init__(self, *buckets: str) -> None:
        """Begin to serve."""
        self.kept_at_once = 1 << 62
        self.max_page = 1000
        self.allows: Callable[[str, str, str], bool] = lambda *_: True
        self.uploads: dict[str, Upload] = {}
        self._api = Api("storage.v1")
        self._objects: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self._numbers = itertools.count(1)
        self._state = threading.RLock()
        self._methods: Mapping[str, Callable[[Params, Request], Answer | Resource]] = {
            "storage.buckets.get": self._get_bucket,
            "storage.objects.delete": self._delete,
            "storage.objects.get": self._get,
            "storage.objects.list": self._list,
            "storage.objects.patch": self._patch,
        }
        super().__init__(self._serve)

    def add_bucket(self, name: str) -> None:
        """Make a bucket; past every check, as the two below."""
        self._objects[name] = {}

    def content(self, bucket: str, name: str) -> bytes | None:
        """The content of an object, or None."""
        stored = self._objects[bucket].get(name)
        return None if stored is None else stored.content

    def spoil(self, bucket: str, name: str, content: bytes) -> None:
        """Change an object's bytes behind its checksums."""
        stored = self._objects[bucket][name]
        self._objects[bucket][name] = Stored(content, stored.resource)

    def _serve(self, request: Request) -> Answer:
        try:
            call = self._api.call(request.method, request.path, request.query)
        except NotOfTheApi as error:
            if "upload_id" in request.query:  # PUT and DELETE are in no document.
                return self._upload_call(request)
            raise GoogleError(400, "invalid", str(error)) from None
        if request.is_cut:
            raise GoogleError(400, "invalid", "the body ended early")
        with self._state:
            if call.method_id == "storage.objects.insert":
                return self._insert_call(call, request)
            if call.method_id not in self._methods:
                raise GoogleError(501, "notImplemented", f"no {call.method_id} here")
            return self._method_call(call, request)

    def _method_call(self, call: Call, request: Request) -> Answer:
        body = _json_of(request)
        self._check_request(call.method_id, body)
        answer = self._methods[call.method_id](call.params, request)
        if isinstance(answer, Answer):
            return answer
        self._api.check_answer(call.method_id, answer)
        return json_answer(answer)

    def _check_request(self, method_id: str, body: Resource) -> None:
        try:
            self._api.check_request(method_id, body)
        except NotOfTheApi as error:
            raise GoogleError(400, "invalid", str(error)) from None

    # Permissions and conditions.

    def _need(self, permission: str, bucket: str, name: str) -> None:
        if bucket not in self._objects:
            raise GoogleError(404, "notFound", "The specified bucket does not exist.")
        if not self.allows(permission, bucket, name):
            message = f"caller does not have {permission} access to {name!r}"
            raise GoogleError(403, "forbidden", message)

    def _need_to_write(self, bucket: str, name: str) -> None:
        self._need("storage.objects.create", bucket, name)
        if name in self._objects[bucket]:  # To overwrite is to delete as well.
            self._need("storage.objects.delete", bucket, name)

    def _check_conditions(
        self, stored: Stored | None, params: Params, infix: str = ""
    ) -> None:
        number = "0" if stored is None else stored.resource["generation"]
        meta = "0" if stored is None else stored.resource["metageneration"]
        wrong = "At least one of the pre-conditions you specified did not hold."
        for kind, actual in (("Generation", number), ("Metageneration", meta)):
            match = params.get(f"if{infix}{kind}Match", actual)
            if match != actual:
                raise GoogleError(412, "conditionNotMet", wrong)
            if params.get(f"if{infix}{kind}NotMatch") == actual:
                raise GoogleError(304, "notModified", wrong)

    def _find(self, bucket: str, name: str, params: Params) -> Stored:
        self._need("storage.objects.get", bucket, name)
        return self._existing(bucket, name, params)

    def _existing(self, bucket: str, name: str, params: Params) -> Stored:
        stored = self._objects[bucket].get(name)
        # Without versioning an older generation is as gone as the object.
        if stored is None or (
            params.get("generation", stored.resource["generation"])
            != stored.resource["generation"]
        ):
            if not self.allows("storage.objects.list", bucket, ""):
                message = f"no access to {name!r} (or it may not exist)"
                raise GoogleError(403, "forbidden", message)
            raise GoogleError(404, "notFound", f"No such object: {bucket}/{name}")
        self._check_conditions(stored, params)
        return stored

    # Reading.

    def _get_bucket(self, params: Params, _: Request) -> Resource:
        self._need("storage.buckets.get", params["bucket"], "")
        return {"kind": "storage#bucket", "name": params["bucket"], "location": "US"}

    def _get(self, params: Params, request: Request) -> Answer | Resource:
        stored = self._find(params["bucket"], params["object"], params)
        if params.get("alt") != "media":
            return stored.resource
        return media_answer(stored, request.headers.get("range", ""))

    def _list(self, params: Params, _: Request) -> Resource:
        bucket, prefix = params["bucket"], params.get("prefix", "")
        self._need("storage.objects.list", bucket, prefix)
        begin = max(params.get("startOffset", ""), _decode(params.get("pageToken", "")))
        names = sorted(
            name
            for name in self._objects[bucket]
            if name.startswith(prefix) and name >= begin
        )
        size = min(int(params.get("maxResults", self.max_page)), self.max_page)
        items, folders = [], set()
        for name in names[:size]:
            inner, delimiter, _ = name[len(prefix) :].partition(
                params.get("delimiter", "\0")
            )
            if delimiter:
                folders.add(prefix + inner + delimiter)
            else:
                items.append(self._objects[bucket][name].resource)
        page: Resource = {"kind": "storage#objects", "items": items}
        if folders:
            page["prefixes"] = sorted(folders)
        if len(names) > size:
            page["nextPageToken"] = _encode(names[size])
        return page

    # Changing.

    def _delete(self, params: Params, _: Request) -> Answer:
        bucket, name = params["bucket"], params["object"]
        self._need("storage.objects.delete", bucket, name)
        self._existing(bucket, name, params)
        del self._objects[bucket][name]
        return Answer(204)

    def _patch(self, params: Params, request: Request) -> Resource:
        bucket, name = params["bucket"], params["object"]
        self._need("storage.objects.update", bucket, name)
        stored = self._existing(bucket, name, params)
        meta = str(int(stored.resource["metageneration"]) + 1)
        changed = {
            **stored.resource,
            **_json_of(request),
            "metageneration": meta,
        }
        self._objects[bucket][name] = Stored(stored.content, changed)
        return changed

    def _write(
        self, bucket: str, resource: Resource, content: bytes, params: Params
    ) -> Resource:
        """Give an object its name, if all that was said of it holds."""
        name = resource["name"]
        self._need_to_write(bucket, name)
        self._check_conditions(self._objects[bucket].get(name), params)
        actual = checksums(content)
        for kind, value in actual.items():
            if resource.get(kind, value) != value:
                message = f"Provided {kind} does not match calculated {kind}"
                raise GoogleError(400, "invalid", message)
        number = 1_700_000_000_000_000 + next(self._numbers)
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        written = {
            "contentType": "application/octet-stream",
            **resource,
            **actual,
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{number}",
            "bucket": bucket,
            "size": str(len(content)),
            "generation": str(number),
            "metageneration": "1",
            "etag": base64.b64encode(str(number).encode()).decode(),
            "timeCreated": now,
            "updated": now,
        }
        if "kmsKeyName" in params:
            written["kmsKeyName"] = params["kmsKeyName"] + "/cryptoKeyVersions/1"
        self._api.check_answer("storage.objects.insert", written)
        self._objects[bucket][name] = Stored(content, written)
        return written

    # Uploading.

    def _insert_call(self, call: Call, request: Request) -> Answer:
        kind = call.params.get("uploadType")
        bucket = call.params["bucket"]
        if not call.is_upload or kind not in {"media", "multipart", "resumable"}:
            raise GoogleError(400, "invalid", f"uploadType {kind!r}")
        content = b""
        resource: Resource = {}
        if kind == "multipart":
            resource, content = _parts(request)
        elif kind == "media":
            content = request.body
        else:
            resource = _json_of(request)
        self._check_request(call.method_id, resource)
        resource.setdefault("name", call.params.get("name"))
        if not resource["name"]:
            raise GoogleError(400, "required", "the object has no name")
        _check_name(resource["name"])
        self._need_to_write(bucket, resource["name"])
        if kind != "resumable":
            return json_answer(self._write(bucket, resource, content, call.params))
        stored = self._objects[bucket].get(resource["name"])
        self._check_conditions(stored, call.params)
        upload_id = f"session-{next(self._numbers)}"
        self.uploads[upload_id] = Upload(bucket, resource, call.params)
        # By the client's way, which may lead through a proxy.
        origin = f"http://{request.headers['host']}"
        location = f"{origin}{request.path}?uploadType=resumable"
        return Answer(200, {"Location": f"{location}&upload_id={upload_id}"})

    def _upload_call(self, request: Request) -> Answer:
        with self._state:
            upload = self.uploads.get(request.query["upload_id"])
            if upload is None:
                raise GoogleError(404, "notFound", "there is no such upload")
            if request.method == "DELETE":
                del self.uploads[request.query["upload_id"]]
                return Answer(499)
            if upload.answer is None:
                upload.answer = self._take(upload, request)
            return upload.answer or _so_far(upload)

    def _take(self, upload: Upload, request: Request) -> Answer | None:
        """Take a chunk, and return the answer if it was the last."""
        pattern = r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)"
        found = re.fullmatch(pattern, request.headers.get("content-range", ""))
        if found is None:
            raise GoogleError(400, "invalid", "malformed Content-Range")
        total = None if found[3] == "*" else int(found[3])
        if found[1]:
            begin, end = int(found[1]), int(found[2]) + 1
            if begin > len(upload.content):
                raise GoogleError(503, "backendError", "a chunk is missing")
            if end != total and (end - begin) % KIB_256:
                raise GoogleError(400, "invalid", "a chunk is no multiple of 256 KiB")
            # What is there already is kept: a cut request may come in late.
            new = request.body[len(upload.content) - begin :][: self.kept_at_once]
            upload.content += new
            if len(upload.content) < end:  # Only whole blocks are kept.
                del upload.content[len(upload.content) // KIB_256 * KIB_256 :]
        if len(upload.content) != total:
            return None
        return self._finish(upload, request.headers.get("x-goog-hash", ""))

    def _finish(self, upload: Upload, said: str) -> Answer:
        content = bytes(upload.content)
        crc = checksums(content)["crc32c"]
        for part in filter(None, said.split(",")):
            if part.startswith("crc32c=") and part != f"crc32c={crc}":
                raise GoogleError(400, "invalid", "crc32c does not match")
        written = self._write(upload.bucket, upload.resource, content, upload.params)
        return json_answer(written)


def checksums(content: bytes) -> dict[str, str]:
    """Both checksums of a content, in the service's form."""
    crc = google_crc32c.value(content).to_bytes(4, "big")
    md5 = hashlib.md5(content, usedforsecurity=False).digest()
    return {
        "crc32c": base64.b64encode(crc).decode(),
        "md5Hash": base64.b64encode(md5).decode(),
    }


def media_answer(stored: Stored, byte_range: str) -> Answer:
    """Answer with an object's content, or a range of it."""
    resource, content = stored.resource, stored.content
    headers = {
        "Content-Type": resource["contentType"],
        "ETag": resource["etag"],
        "X-Goog-Generation": resource["generation"],
        "X-Goog-Metageneration": resource["metageneration"],
        "X-Goog-Hash": f"crc32c={resource['crc32c']},md5={resource['md5Hash']}",
        "X-Goog-Stored-Content-Length": str(len(content)),
    }
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", byte_range)
    if found is None:
        return Answer(200, headers, content)
    begin = int(found[1])
    end = min(int(found[2]) + 1 if found[2] else len(content), len(content))
    if begin >= len(content):
        raise GoogleError(416, "requestedRangeNotSatisfiable", "beyond its end")
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
    return Answer(206, headers, content[begin:end])


def _so_far(upload: Upload) -> Answer:
    if not upload.content:
        return Answer(308)
    return Answer(308, {"Range": f"bytes=0-{len(upload.content) - 1}"})


def _json_of(request: Request) -> Resource:
    body: Resource = json.loads(request.body) if request.body else {}
    return body


def _parts(request: Request) -> tuple[Resource, bytes]:
    """Take a multipart/related body apart: what is said of the object, and it."""
    found = re.search(r"boundary=(['\"]?)(.+)\1$", request.headers["content-type"])
    if found is None:
        raise GoogleError(400, "invalid", "no boundary between the parts")
    begin, resource, content, end = request.body.split(b"--" + found[2].encode())
    if begin or not end.startswith(b"--"):
        raise GoogleError(400, "invalid", "malformed parts")
    return (
        json.loads(re.split(rb"\r?\n\r?\n", resource, maxsplit=1)[1]),
        re.sub(rb"\r?\n\Z", b"", re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1]),
    )


def _check_name(name: str) -> None:
    long = len(name.encode()) > 1024
    if long or name in {".", ".."} or "\r" in name or "\n" in name:
        raise GoogleError(400, "invalid", "no name for an object")


def _encode(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _decode(token: str) -> str:
    return base64.urlsafe_b64decode(token).decode()
