"""``simulation.fleet``: many sites from a few numbers, or from a file of them."""

import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import tomli_w
from support import toy

from cloud_adapters.local.virtual_grid import KnownAbsences
from federation.errors import JobError
from federation.job import job_digest, job_file


def job_of(fleet: dict[str, Any] | str, **tables: Any):
    document = toy.document() | {"simulation": {"fleet": fleet}} | tables
    if "sites" not in tables:
        del document["sites"]
    return job_file.parse(document)


FLEET = {"sites": 400, "examples_per_second": 50.0, "spread": 4.0, "away_share": 0.2}


def test_sites_are_drawn_about_their_medians_and_always_the_same():
    job = job_of(FLEET)
    machines = job.simulation.machines
    assert [site.name for site in job.sites] == [machine.site for machine in machines]
    assert {len(site.name) for site in job.sites} == {len("site-001")}
    speeds = sorted(machine.examples_per_second for machine in machines)
    assert median(speeds) == pytest.approx(50.0, rel=0.15)
    within = sum(50 / 4 <= speed <= 50 * 4 for speed in speeds) / len(speeds)
    assert within == pytest.approx(0.95, abs=0.03)
    assert {machine.away_share for machine in machines} == {0.2}
    assert job_of(FLEET) == job
    assert job_of(FLEET, seed=8).simulation != job.simulation


def test_fleet_is_only_a_short_form():
    job = job_of(FLEET | {"sites": 3})
    again = job_file.parse(job_file.document(job))
    assert again == job
    assert job_digest.digest(again) == job_digest.digest(job)


def in_a_file(folder: Path, text: str):
    """A job whose fleet is described in a file of its own, in another folder."""
    (folder / "fleets").mkdir(exist_ok=True)
    (folder / "fleets" / "few.toml").write_text(text)
    document = toy.document({"simulation": {"fleet": "fleets/few.toml"}})
    del document["sites"]
    (folder / "job.toml").write_text(tomli_w.dumps(document))
    return job_file.load(folder / "job.toml")


def test_a_file_of_its_own_is_the_same_fleet(tmp_path: Path):
    fleet = FLEET | {"sites": 3}
    job, other = (
        in_a_file(tmp_path, tomli_w.dumps(fleet | change))
        for change in ({}, {"sites": 4})
    )
    assert job == job_of(fleet)
    assert job_digest.digest(job) == job_digest.digest(job_of(fleet))
    assert job_digest.digest(other) != job_digest.digest(job)
    with pytest.raises(JobError, match="file of your own"):
        job_of("fleets/few.toml")


def test_a_path_that_no_system_can_open_is_refused():
    """As it may come from any file of a user's."""
    with pytest.raises(JobError, match="is no path"):
        job_file.read_toml(Path("few\0.toml"))


def test_every_machine_has_the_fleets_prices():
    job = job_of(FLEET | {"dollars_per_hour": 2.0, "dollars_per_gigabyte": 0.1})
    found = {
        (m.dollars_per_hour, m.dollars_per_gigabyte) for m in job.simulation.machines
    }
    assert found == {(2.0, 0.1)}


def test_a_trace_is_beside_the_file_that_names_it(tmp_path: Path):
    traced(tmp_path, TRACE)
    (tmp_path / "fleets").mkdir()
    (tmp_path / "event_trace.tab").rename(tmp_path / "fleets" / "event_trace.tab")
    fleet = {"sites": 2, "examples_per_second": 9.0, "trace": "event_trace.tab"}
    job = in_a_file(tmp_path, tomli_w.dumps(fleet))
    assert job.simulation.machines[0].away == ((30.0, 50.0),)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("sites = 3", r"simulation.fleet: .*few.toml: examples_per_second"),
        ("sites = 3\nexamples_per_second = 1.0\nspeed = 2", r"few.toml: speed"),
        ("sites = 3\nexamples_per_second = -1.0", r"few.toml: examples_per_second"),
        ("sites = ", r"simulation.fleet: .*few.toml is not TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_key(
    text: str, match: str, tmp_path: Path
):
    with pytest.raises(JobError, match=match):
        in_a_file(tmp_path, text)


@pytest.mark.parametrize(
    ("fleet", "tables", "key"),
    [
        (FLEET, {"sites": [{"name": "a"}]}, "simulation.fleet"),
        ({"sites": 3}, {}, "simulation.fleet.examples_per_second"),
        (FLEET | {"spread": 0.5}, {}, "simulation.fleet.spread"),
        (FLEET | {"sites": 0}, {}, "simulation.fleet.sites"),
        (FLEET | {"examples_per_second": -1.0}, {}, "fleet.examples_per_second"),
        (FLEET | {"away_share": 1.0}, {}, "simulation.fleet.away_share"),
        (FLEET | {"dollars_per_hour": -1.0}, {}, "simulation.fleet.dollars_per_hour"),
        (FLEET | {"dollars_per_hour": math.nan}, {}, "fleet.dollars_per_hour"),
        (FLEET | {"dollars_per_gigabyte": math.inf}, {}, "fleet.dollars_per_gigabyte"),
        (FLEET, {"seed": "today"}, "seed"),
    ],
)
def test_bad_fleets_are_refused_by_name(
    fleet: dict[str, Any], tables: dict[str, Any], key: str
):
    with pytest.raises(JobError) as caught:
        job_of(fleet, **tables)
    assert key in str(caught.value)


HEAD = "#event_id\tcomponent_id\tnode_id\tplatform_id\tnode_name\tevent_type\t"
HEAD += "event_start_time\tevent_stop_time\tevent_end_reason\n"
# Node 7 is away from 130 to 150 s; node 9 comes at 120 and goes at 180 s.
TRACE = [(7, 1, 100, 130), (9, 1, 120, 180), (7, 0, 130, 150), (7, 1, 150, 200)]


def traced(folder: Path, rows: list[tuple[object, ...]], **fleet: Any):
    lines = [f"0\t0\t{n}\t1\tx\t{k}\t{b}\t{e}\t0\n" for n, k, b, e in rows]
    (folder / "event_trace.tab").write_text(HEAD + "".join(lines))
    speed = {"examples_per_second": 9.0, "trace": "event_trace.tab"}
    document = toy.document({"simulation": {"fleet": {"sites": 2, **speed, **fleet}}})
    del document["sites"]
    (folder / "job.toml").write_text(tomli_w.dumps(document))
    return job_file.load(folder / "job.toml")


def test_a_public_trace_says_when_sites_are_away(tmp_path: Path):
    job = traced(tmp_path, TRACE)
    one, two = job.simulation.machines
    assert (one.away, two.away) == (((30.0, 50.0),), ((0.0, 20.0), (80.0, 100.0)))
    assert one.away_every == two.away_every == 100.0
    # Its own document says all of it, without the file.
    (tmp_path / "event_trace.tab").unlink()
    assert job_file.parse(job_file.document(job)) == job
    assert traced(tmp_path, TRACE, sites=1).simulation.machines[0].away == one.away
    trace = tmp_path / "event_trace.tab"
    trace.write_text("# a comment\n" + trace.read_text())
    assert job_file.load(tmp_path / "job.toml").simulation.machines[0].away == one.away


def test_absences_repeat_with_the_trace():
    spells = ((0.0, 20.0), (80.0, 100.0))
    found = KnownAbsences(spells=spells, every=100.0)
    for since, expected in (
        *((0.0, (0.0, 20.0)), (19.9, (0.0, 20.0)), (20.0, (80.0, 100.0))),
        *((99.0, (80.0, 100.0)), (100.0, (100.0, 120.0)), (250.0, (280.0, 300.0))),
    ):
        assert found.next(since) == expected
    assert KnownAbsences(spells=spells).next(99.0) == (80.0, 100.0)
    end, long = 1e6 + 0.1, KnownAbsences(spells=((0.0, 0.1),), every=1e6)
    assert long.next(end)[1] > end  # Or who waits until then would wait for ever.
    assert KnownAbsences(spells=spells).next(100.0) == (float("inf"), float("inf"))


@pytest.mark.parametrize(
    ("changes", "fleet", "match"),
    [
        ({2: (7, 0, 131, 150)}, {}, r"tab:4: node 7 from 131 leaves a gap .* 130"),
        ({2: (7, 0, 129, 150)}, {}, r"tab:4: node 7 from 129 overlaps .* 130"),
        ({1: (9, 1, 180, 120)}, {}, r"tab:3: .*end after the begin"),
        ({1: (9, 1, -5, 120)}, {}, r"tab:3: .*seconds from 0"),
        ({1: (9, 2, 120, 180)}, {}, r"tab:3: .*0 \(away\) or 1"),
        ({1: (9, 1, "soon", 180)}, {}, r"tab:3: "),
        ({}, {"sites": 3}, r"\(2\) for the fleet \(3"),
        ({}, {"away_share": 0.1}, "remove away_share"),
        ({}, {"trace": "none.tab"}, r"none\.tab"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(
    changes: dict[int, Any], fleet: dict[str, Any], match: str, tmp_path: Path
):
    rows = [changes.get(index, row) for index, row in enumerate(TRACE)]
    with pytest.raises(JobError, match=match):
        traced(tmp_path, rows, **fleet)


def test_a_job_of_someone_else_reads_no_trace(tmp_path: Path):
    """A site parses what an aggregator sends."""
    traced(tmp_path, TRACE)
    with pytest.raises(JobError, match="file of your own"):
        job_of({"sites": 2, "examples_per_second": 9.0, "trace": "/etc/hostname"})


@pytest.mark.parametrize(
    "away", [[[5.0, 4.0]], [[0.0, 5.0], [4.0, 6.0]], [[-1.0, 2.0]], [[1.0]]]
)
def test_absences_out_of_order_are_refused(away: list[list[float]]):
    machine = {"site": toy.SITES[0], "examples_per_second": 1.0, "away": away}
    with pytest.raises(JobError, match=r"machines\[0\].away"):
        toy.job({"simulation": {"machines": [machine]}})
