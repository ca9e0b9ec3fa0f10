"""The clients that ``storage_cloud.py`` compares, all with the same methods.

Not a benchmark.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from sink import BLOCK, MIB


class Stream(io.RawIOBase):
    """A file of so many bytes; it cannot be rewound, and says where it stands."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._place = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._place
        size = left if size < 0 else min(size, left)
        self._place += size
        return (BLOCK * -(-size // MIB))[:size]


def blocks(size: int) -> Iterator[bytes]:
    """The same bytes, for our stores."""
    for _ in range(size // MIB):
        yield BLOCK


@dataclass(frozen=True, slots=True)
class Place:
    """Where objects go: a bucket, and what names in it begin with."""

    url: str
    endpoint: str | None

    @property
    def bucket(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        return urlsplit(self.url).path.strip("/")

    def name_of(self, client: str, key: str) -> str:
        """Of an object of theirs: no client reads what another wrote."""
        return f"{self.prefix}/{client}/{key}"

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, where nobody asks for credentials."""
        return urlsplit(self.endpoint or "").hostname == "127.0.0.1"


class Boto3:
    """Amazon's client with one of its settings."""

    name = "s3"
    # Part size, threads, and whether it checks.
    settings: ClassVar = [
        (part, threads, checks)
        for checks in (True, False)
        for part, threads in ((8 * MIB, 4), (8 * MIB, 10), (16 * MIB, 8))
    ]

    def __init__(self, place: Place, setting: tuple[int, int, bool]) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        part_bytes, threads, checks = setting
        when = "when_supported" if checks else "when_required"
        self.is_checked = checks
        self._name = partial(place.name_of, f"boto3-{part_bytes}-{threads}-{checks}")
        self._bucket = place.bucket
        self._client = boto3.client(
            "s3",
            endpoint_url=place.endpoint,
            config=Config(
                max_pool_connections=32,
                request_checksum_calculation=when,
                response_checksum_validation=when,
                s3={"addressing_style": "path" if place.endpoint else "auto"},
            ),
        )
        self._config = TransferConfig(
            multipart_threshold=part_bytes,
            multipart_chunksize=part_bytes,
            max_concurrency=threads,
        )

    @staticmethod
    def store(place: Place) -> Any:
        from cloud_adapters.storage.s3.store import S3Store

        return S3Store(place.bucket, place.prefix, endpoint_url=place.endpoint)

    def up(self, key: str, size: int) -> None:
        target = (self._bucket, self._name(key))
        self._client.upload_fileobj(Stream(size), *target, Config=self._config)

    def put(self, key: str, content: bytes) -> None:
        name = self._name(key)
        self._client.put_object(Bucket=self._bucket, Key=name, Body=content)

    def look(self, key: str) -> None:
        self._client.head_object(Bucket=self._bucket, Key=self._name(key))

    def get(self, key: str) -> None:
        answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
        answer["Body"].read()

    def down(self, key: str, path: Path) -> None:
        source = (self._bucket, self._name(key))
        self._client.download_file(*source, str(path), Config=self._config)


class Google:
    """Google's client with one of its chunk sizes; the last is its default."""

    name = "gcs"
    settings: ClassVar = [8 * MIB, 16 * MIB, 100 * MIB]
    is_checked = True

    def __init__(self, place: Place, chunk_bytes: int) -> None:
        from google.cloud import storage

        options = {"api_endpoint": place.endpoint} if place.endpoint else None
        client = storage.Client(
            project="bench" if place.is_here else None,
            credentials=_no_credentials(place),
            client_options=options,
        )
        self._name = partial(place.name_of, f"google-{chunk_bytes}")
        self._bucket = client.bucket(place.bucket)
        self._chunk_bytes = chunk_bytes

    @staticmethod
    def store(place: Place) -> Any:
        from cloud_adapters.storage.gcs.store import GcsStore

        return GcsStore(
            place.bucket,
            place.prefix,
            endpoint=place.endpoint,
            credentials=_no_credentials(place),
        )

    def up(self, key: str, size: int) -> None:
        blob = self._bucket.blob(self._name(key), chunk_size=self._chunk_bytes)
        blob.upload_from_file(Stream(size), size=size, checksum="crc32c")

    def put(self, key: str, content: bytes) -> None:
        blob = self._bucket.blob(self._name(key))
        blob.upload_from_string(content, checksum="crc32c")

    def look(self, key: str) -> None:
        self._bucket.blob(self._name(key)).reload()

    def get(self, key: str) -> None:
        blob = self._bucket.blob(self._name(key))
        blob.download_as_bytes(raw_download=True, checksum="crc32c")

    def down(self, key: str, path: Path) -> None:
        blob = self._bucket.blob(self._name(key))
        blob.download_to_filename(str(path), raw_download=True, checksum="crc32c")


class Ours:
    """A store of ours, with the methods of theirs."""

    def __init__(self, kind: Any, place: Place) -> None:
        self._store = kind.store(place)

    def up(self, key: str, size: int) -> None:
        self._store.put(key, blocks(size))

    def put(self, key: str, content: bytes) -> None:
        self._store.put(key, [content])

    def look(self, key: str) -> None:
        self._store.stat(key)

    def get(self, key: str) -> None:
        self._store.read(key)

    def down(self, key: str, path: Path) -> None:
        from cloud_adapters.storage.disk.transfer import download

        download(self._store, key, path)


def _no_credentials(place: Place) -> Any:
    """Of nobody, on this machine; elsewhere None, for the environment's."""
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials() if place.is_here else None


THEIRS = {kind.name: kind for kind in (Boto3, Google)}
