"""``[exchange]``: the same place for all parties, or none."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import toy

from cloud_adapters.keys.key_file import add_key
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.transport.frame_references import PackedFrame, Sizes
from deploy.aggregator_host import config as aggregator_file
from deploy.site_host import config as site_file
from deploy.wiring import exchange
from deploy.wiring.exchange import ExchangeSpec
from deploy.wiring.store_meters import StoreMeters, User
from federation.clock import VirtualClock
from federation.errors import CorruptObject, JobError
from federation.job.storage_job import EncryptionSpec
from federation.wire import frame as wire

SITE = """
name = "one"

[aggregator]
address = "localhost:1"
authority = "ca.crt"
"""


@pytest.mark.parametrize(
    "url",
    ["/folder", "file://relative", "memory://", "ftp://host/x", "s3://UPPER", "s3://"],
)
def test_place_that_is_not_the_same_for_all_is_refused(tmp_path: Path, url: str):
    """In both files, which are named with the key."""
    table = f'\n[exchange]\nurl = "{url}"\n'
    for name, text in (("aggregator.toml", ""), ("site.toml", SITE)):
        path = tmp_path / name
        path.write_text(text + table)
        load = site_file.load if name == "site.toml" else aggregator_file.load
        with pytest.raises(JobError, match=r"exchange\.url") as caught:
            load(path)
        assert str(caught.value).count(str(path)) == 1


def test_site_and_aggregator_read_the_same_table(tmp_path: Path):
    """So that one text can be given to all."""
    table = f'\n[exchange]\nurl = "file://{tmp_path}/store"\nthreshold_mb = 1\n'
    (tmp_path / "aggregator.toml").write_text(table)
    (tmp_path / "site.toml").write_text(SITE + table)
    mine = aggregator_file.load(tmp_path / "aggregator.toml").file.exchange
    assert mine == site_file.load(tmp_path / "site.toml").file.exchange
    with exchange.opened(mine, tmp_path / "scratch") as frames:
        assert frames.threshold_bytes == 1 << 20


def large_update(spec: ExchangeSpec, scratch: Path) -> PackedFrame:
    """Send an update of a bit more than a MiB."""
    values = toy.update().delta_d.repeat((1 << 18) + 1)
    with exchange.opened(spec, scratch) as frames:
        return frames.send(toy.update(delta_d=values))


def test_scratch_folder_goes_with_the_agent(tmp_path: Path):
    """Nothing has a name in it."""
    spec = ExchangeSpec(url=f"file://{tmp_path}/store", threshold_mb=1)
    update = toy.update(delta_d=np.zeros(1 << 19, dtype=np.float32))
    with exchange.opened(spec, tmp_path / "scratch") as frames:
        packed = frames.send(update)
        head = wire.decode(packed.frame)
        sizes = Sizes(num_floats=1 << 19, num_integers=0)
        found = frames.receive(head, packed.references, sizes)
        assert wire.encode_bytes(found) == wire.encode_bytes(update)
        assert (tmp_path / "scratch").is_dir()
    assert not (tmp_path / "scratch").exists()


def test_objects_may_be_encrypted(tmp_path: Path):
    """The store then sees no value of an update."""
    key_file = tmp_path / "exchange.key"
    add_key(key_file)
    place = tmp_path / "store"
    spec = ExchangeSpec(
        url=f"file://{place}",
        encryption=EncryptionSpec(key=f"file:{key_file}"),
        threshold_mb=1,
    )
    (reference,) = large_update(spec, tmp_path / "scratch").references
    (info,) = LocalStore(place).list()
    assert info.size > reference.size
    content = LocalStore(place).read(info.key)
    assert toy.update().delta_d[:1].tobytes() * 4 not in content


def test_missing_key_of_encryption_is_named(tmp_path: Path):
    """By its place in the file."""
    spec = ExchangeSpec(
        url=f"file://{tmp_path}", encryption=EncryptionSpec(key="nonsense")
    )
    with pytest.raises(JobError, match=r"exchange\.encryption\.key"):
        large_update(spec, tmp_path / "scratch")


def test_store_is_metered_below_its_encryption(tmp_path: Path):
    """What is noted is what a cloud bills: the bytes that lie in the bucket."""
    key_file = tmp_path / "exchange.key"
    add_key(key_file)
    place, meters = tmp_path / "store", StoreMeters(VirtualClock())
    spec = ExchangeSpec(
        url=f"file://{place}",
        encryption=EncryptionSpec(key=f"file:{key_file}"),
        threshold_mb=1,
    )
    update = toy.update(delta_d=np.zeros(1 << 19, dtype=np.float32))
    watch = meters.watch(User(name="one"))
    with exchange.opened(spec, tmp_path / "scratch", watch=watch) as frames:
        packed = frames.send(update)
        (info,) = LocalStore(place).list()
        frames.discard(wire.decode(packed.frame), packed.references)
    (used,) = meters.used()
    assert (used.who, used.url) == ("one", LocalStore(place).url)
    uses = {use.operation: use for use in used.uses}
    assert uses["put"].sent_bytes == info.size > update.delta_d.nbytes
    assert uses["delete"].calls == 1


def test_side_that_does_not_decrypt_is_told_what_to_look_at(tmp_path: Path):
    """Its table differs from that of the others."""
    key_file = tmp_path / "exchange.key"
    add_key(key_file)
    plain = ExchangeSpec(url=f"file://{tmp_path}/store", threshold_mb=1)
    spec = replace(plain, encryption=EncryptionSpec(key=f"file:{key_file}"))
    with exchange.opened(spec, tmp_path / "scratch") as frames:
        packed = frames.send(toy.update(delta_d=np.zeros(1 << 19, dtype=np.float32)))
    head, sizes = wire.decode(packed.frame), Sizes(num_floats=1 << 19, num_integers=0)
    with (
        exchange.opened(plain, tmp_path / "scratch") as frames,
        pytest.raises(CorruptObject, match="same at all parties"),
    ):
        frames.receive(head, packed.references, sizes)
