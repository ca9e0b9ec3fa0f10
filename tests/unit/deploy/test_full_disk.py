"""A full disk of the aggregator: a site can be revoked, and space comes back."""

import contextlib
import importlib.util
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from faults import disks
from support.enrolments import Federation
from support.programs import needs
from support.small_jobs import small_job

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.superlink.answer_limits import Limits, free_bytes
from deploy.aggregator_host import (
    config as aggregator_file,
    disk_reserve,
    enrolment_operator,
    run_list,
    run_queue,
    superlink_process,
)
from deploy.aggregator_host.config import (
    AggregatorConfig,
    AggregatorFile,
    LimitsSpec,
)
from deploy.aggregator_host.enrolment_book import BookDamaged, BookFile, Invitation
from deploy.cli import commands as cli, run_verbs
from federation.clock import VirtualClock
from federation.errors import StoreUnavailable
from monitoring.runs.run_folder import RunFolder

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from fastapi import HTTPException  # noqa: E402

from cloud_adapters.flower.fleet import PASSING  # noqa: E402
from cloud_adapters.superlink import gate as flower_gate  # noqa: E402
from deploy.aggregator_host.service import AggregatorService  # noqa: E402

pytestmark = pytest.mark.flower
MIB = 1 << 20

needs_a_disk = needs("root", "mount")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """An aggregator on a disk of its own, with one site."""
    disk = tmp_path / "disk"
    with disks.disks([disk], size=2 * disk_reserve.RESERVE_BYTES):
        made = Federation(folder=disk)
        made.site("site-a")
        yield made


def revoked(federation: Federation) -> int:
    """Number of certificates on the proxy's list."""
    path = federation.aggregator / "ca.crl"
    if not path.exists():
        return 0
    return len(list(x509.load_pem_x509_crl(path.read_bytes())))


@needs_a_disk
def test_a_site_is_revoked_although_the_disk_is_full(federation: Federation):
    """What is kept for it is used, and put back."""
    assert disk_reserve.fill(federation.aggregator)
    disks.fill(federation.folder)
    done = federation.revoke("site-a")
    assert done.certificates == revoked(federation) == 1
    assert BookFile(folder=federation.aggregator).read().member("site-a") is None
    disks.clear(federation.folder)
    assert disk_reserve.fill(federation.aggregator)


@needs_a_disk
def test_the_proxy_is_first(federation: Federation):
    """Where the book has no room left, its list has; the next start reads it there."""
    book_file = BookFile(folder=federation.aggregator)
    book = book_file.read()
    many = tuple(
        Invitation(digest="0" * 64, site=f"other-{n}", expires=9e9) for n in range(999)
    )
    book_file.write(replace(book, invitations=many))
    disks.leave(federation.folder, 3 * 4096)
    with pytest.raises(BookDamaged, match="No space left"):
        federation.revoke("site-a")
    assert revoked(federation) == 1
    assert book_file.read().member("site-a") is not None

    disks.clear(federation.folder)
    assert enrolment_operator.prepare(federation.config, clock=federation.clock) == (
        "site-a",
    )
    assert book_file.read().member("site-a") is None


@needs_a_disk
def test_there_is_no_part_of_a_reserve(federation: Federation):
    """A file that is shorter would promise what is not there."""
    disks.leave(federation.folder, 8 * MIB)
    assert not disk_reserve.fill(federation.aggregator)
    assert not disk_reserve.is_there(federation.aggregator)
    assert free_bytes(federation.folder) >= 8 * MIB


def test_no_reserve_appears_where_none_was(tmp_path: Path):
    """The command may be given a folder that is no aggregator's."""
    with disk_reserve.released(tmp_path):
        pass
    assert not any(tmp_path.iterdir())


def test_the_reserve_is_put_back_after_an_error(tmp_path: Path):
    disk_reserve.fill(tmp_path)
    with contextlib.suppress(ValueError), disk_reserve.released(tmp_path):
        assert not disk_reserve.is_there(tmp_path)
        raise ValueError
    assert (tmp_path / disk_reserve.NAME).stat().st_size == disk_reserve.RESERVE_BYTES


def test_a_revocation_leaves_room_for_no_answer():
    """The service must not take the reserve back while it is being used."""
    assert LimitsSpec().bytes().reserve > disk_reserve.RESERVE_BYTES


def test_the_disk_keeps_a_reserve(tmp_path: Path):
    """Whatever a site's own limits are: an answer that would take it waits."""
    free = free_bytes(tmp_path)
    limits = Limits(answer=1, site=1, run=1, reserve=free // 2)
    gate = flower_gate.Gate(limits=limits, folder=tmp_path)
    gate.check_disk(free // 4)
    with pytest.raises(HTTPException, match=r"limits\.reserve_mib") as refused:
        gate.check_disk(free - free // 4)
    assert refused.value.status_code in PASSING


def test_a_full_disk_is_told_once_and_its_reserve_comes_back(tmp_path: Path):
    """Answers are refused meanwhile, and the proxy is told so."""
    said: list[str] = []

    def config(reserve_mib: int) -> AggregatorConfig:
        limits = LimitsSpec(reserve_mib=reserve_mib)
        file = AggregatorFile(listen="h:1", hosts=("h",), limits=limits)
        return AggregatorConfig(file=file, folder=tmp_path)

    full = config(2 * free_bytes(tmp_path) // MIB)
    full.flower.mkdir(parents=True)
    service = AggregatorService(
        config=full,
        config_path=tmp_path,
        clock=VirtualClock(),
        listener=said.append,
    )
    for _ in range(2):
        service._look_at_disk()
    assert ["MiB free" in line for line in said] == [True]
    assert not disk_reserve.is_there(tmp_path)
    service._answers = True
    assert service._health(b"") == (503, b'{"status": "disk full"}')
    service.config = config(1)
    for _ in range(2):
        service._look_at_disk()
    assert ["again" in line for line in said] == [False, True]
    assert disk_reserve.is_there(tmp_path)
    assert service._health(b"") == (200, b'{"status": "ok"}')


def test_a_full_disk_is_named_to_who_looks_at_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    limits = f"limits.reserve_mib = {2 * free_bytes(tmp_path) // MIB}\n"
    toml = tmp_path / "aggregator.toml"
    toml.write_text(f'listen = "h:1"\nhosts = ["h"]\n{limits}')
    config = aggregator_file.load(toml)
    run, clock = RunFolder(config.runs / "small" / "one"), VirtualClock()
    run_queue.submit(small_job(), run, at=0.0)
    assert cli.main(["ps", "--aggregator", str(toml)]) == 0
    assert "MiB free" in capsys.readouterr().err
    assert "MiB free" in run_list.of_aggregator(config, clock).trouble()
    pauses = run_verbs._Pauses(run, config, clock)
    for _ in range(3):
        clock.sleep(run_verbs.PAUSE_SECONDS)
        pauses.look()
    assert capsys.readouterr().err.count("run one waits for space: the disk") == 1
    toml.write_text('listen = "h:1"\nhosts = ["h"]\n')
    assert cli.main(["ps", "--aggregator", str(toml)]) == 0
    assert "MiB free" not in capsys.readouterr().err


def test_state_shrinks_again(tmp_path: Path):
    """With every transaction."""
    path = tmp_path / "state.db"
    superlink_process.prepare(path)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE objects (content BLOB)")
        database.execute("INSERT INTO objects VALUES (zeroblob(?))", [8 * MIB])
    assert path.stat().st_size > 8 * MIB
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM objects")
    assert path.stat().st_size < MIB


def test_damaged_state_is_named(tmp_path: Path):
    path = tmp_path / "state.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnavailable, match=r"state\.db.*not a database"):
        superlink_process.prepare(path)
