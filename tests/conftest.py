"""What holds for every test."""

import functools
import gc
import logging
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

import _pytest.logging
import pytest
from _pytest.unraisableexception import gc_collect_iterations_key
from hypothesis import settings

# For `make coverage`, before our own modules are imported.
if "COVERAGE_PROCESS_START" in os.environ:
    import coverage

    coverage.process_startup()
    del os.environ["COVERAGE_PROCESS_START"]  # Not for what tests start.

# Before torch is imported, here and in all that tests start: threads of several
# processes that wait for each other keep two cores busy with waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _not_flushed(file: Any) -> None:
    """Take the place of ``os.fsync``: refuse what is no open file, and flush nothing.

    Only a power cut loses what the system has not yet written, and no test cuts the
    power. Thousands of flushes make two workers wait for one disk.
    """
    os.fstat(file if isinstance(file, int) else file.fileno())


os.fsync = _not_flushed

# The same examples in every run of the same code, whose constants Hypothesis tries too,
# and no wall clock: a busy machine fails no test.
every = settings(deadline=None, derandomize=True)
settings.register_profile("crossfed", every, max_examples=25)
settings.register_profile("thorough", every, max_examples=300)  # For the night.
settings.load_profile("crossfed")


# Whatever talks to a server is slow: starting one, and every request, takes its time.
_SERVERS = {
    "s3_server",
    "s3_store",
    "gcs_server",
    "gcs_store",
    "kms_server",
    "ec2_server",
    "gce_server",
    "kube_server",
}
_SERVED = {"s3", "gcs", "aws", "gcp", "ec2", "gce"}
_WITH_FAST_TESTS = {"contract", "unit"}


_MODULES_MARKS = re.compile(r"^pytestmark = .*?\n\n", re.MULTILINE | re.DOTALL)
# What a module of unit tests has in its text if one of its tests may not be fast.
_NOT_FAST = re.compile(
    r"mark\.(slow|flower|deploy)\b"
    rf'|\b({"|".join(_SERVERS)})\b|"({"|".join(_SERVED)})"'
)


def pytest_ignore_collect(
    collection_path: Path, config: pytest.Config
) -> Literal[True] | None:
    """Import no module whose every test is left out: importing Flower takes seconds."""
    if collection_path.suffix != ".py":
        return None
    left_out = re.findall(r"\bnot (\w+)", config.getoption("markexpr"))
    if "fast" in left_out and _is_all_fast(collection_path):
        return True
    found = _MODULES_MARKS.search(collection_path.read_text("utf-8"))
    marks = re.findall(r"pytest\.mark\.(\w+)", found[0] if found else "")
    return True if set(marks) & set(left_out) else None


def _folder(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


@functools.cache
def _is_all_fast(path: Path) -> bool:
    """Whether no test of a module is slow, by the module's text.

    A test that is, in spite of that, fails to be collected by the others.
    """
    is_module = path.name.startswith("test_") and _folder(path) in _WITH_FAST_TESTS
    return is_module and not _NOT_FAST.search(path.read_text("utf-8"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what follows from what a test uses."""
    if item.get_closest_marker("xdist_group"):
        pass
    elif item.get_closest_marker("flower") and not item.get_closest_marker("deploy"):
        # Ray starts in one worker at a time: two would see each other's files.
        item.add_marker(pytest.mark.xdist_group("flower"))
    elif _shares_a_fixture(item):
        # One worker makes it once; two would make it twice.
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
    call = getattr(item, "callspec", None)
    params = {} if call is None else call.params
    served = any(isinstance(v, str) and v in _SERVED for v in params.values())
    if served or _SERVERS & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.slow)
    if _is_fast(item):
        item.add_marker(pytest.mark.fast)
    elif _is_all_fast(item.path):
        raise pytest.UsageError(
            f"{item.nodeid}: `make test-rest` would leave it out, since nothing in its "
            "file says that it is slow; add the mark where the test is"
        )


def _is_fast(item: pytest.Item) -> bool:
    """Whether `make test-fast` runs it."""
    others = map(item.get_closest_marker, ("slow", "flower", "deploy"))
    return _folder(item.path) in _WITH_FAST_TESTS and not any(others)


# Groups and tests of ten seconds and more, in the order of their length: begun last,
# one would keep one worker busy while the others have nothing left to do. What waits
# for processes stands between what computes.
_BEGUN_FIRST = (
    "test_runs_at_once",
    "flower",
    "fleet",
    "test_deployed",
    "faults",
    "superlink",
    "report",
    "test_killed_at_every_system_call",
    "test_joining_sites",
    "test_ranks",
    "test_agent_stops",
    "test_cli",
    "test_crash_resume",
    "test_local_user",
    "test_deployed_statistics",
    "test_another_machine_ends_private_steps_for_what_was_paid",
    "test_distribution",
    "test_core_alone",
    "huggingface",
    "test_a_group_has_one_worker",
)


def _place(item: pytest.Item) -> int:
    """Where a test stands in that order; all others stay behind, in theirs."""
    mark = item.get_closest_marker("xdist_group")
    names = (mark.args[0] if mark else "", getattr(item, "originalname", item.name))
    return min(map(_BEGUN_FIRST.index, {*names} & {*_BEGUN_FIRST}), default=1000)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Tell the scheduler which tests one worker is to have, and which come first.

    pytest-xdist 3.8 sets ``_nodeid`` for that, which pytest 9.2 does not read: without
    this, groups are dealt like all else, and nothing says so.
    """
    if not config.getoption("loadgroup", default=False):
        return
    items.sort(key=_place)
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        if mark is not None and not item.nodeid.endswith(f"@{mark.args[0]}"):
            item._id = type(item._id).parse(f"{item.nodeid}@{mark.args[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector off modules and tests, which live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)  # Every 700 objects cost 4 % of the fast tests' time.
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what all tests, or all workers, share."""
    # Garbage is collected once at the end and not five times, a quarter second each.
    config.stash[gc_collect_iterations_key] = 1
    if getattr(config.option, "numprocesses", None) and not _is_worker(config):
        # All workers' forks are of one process; see ``support.fork_root``.
        folder = tempfile.mkdtemp()
        os.environ["TESTS_FORK_ROOT"] = f"{os.getpid()} {folder}"
        config.add_cleanup(lambda: shutil.rmtree(folder))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count skipped tests by reason: which kinds of tests did not run, and why."""
    skipped = terminalreporter.stats.get("skipped", ())
    texts = (report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    # A test that needs several things counts for each that is missing.
    reasons = Counter(reason for text in texts for reason in text.split("; "))
    if reasons:
        terminalreporter.section("skipped tests, and what they need")
    for reason, number in reasons.most_common():
        terminalreporter.line(f"{number:4}  {reason}")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


class _RootLogs(_pytest.logging.catching_logs[Any]):
    """Hangs pytest's handler on the root logger alone.

    pytest looks for loggers that hand nothing on, among all the 750 that libraries
    have, six times a test: 7 % of the fast tests' time.
    """

    def __enter__(self) -> Any:
        if self.level is not None:
            return super().__enter__()
        logging.root.addHandler(self.handler)
        self.attached_loggers.append(logging.root)
        return self.handler


_pytest.logging.catching_logs = _RootLogs  # type: ignore[misc]


def pytest_collection_finish() -> None:
    """Let the root logger have what torch's forty loggers are told."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Whether a test uses what its module makes once, which may take seconds."""
    info = getattr(item, "_fixtureinfo", None)
    found = {} if info is None else info.name2fixturedefs
    return any(one.scope == "module" for defs in found.values() for one in defs)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """One for all tests of a worker; each takes a bucket of its own."""
    from support import s3_server as servers  # noqa: PLC0415 (a second to import)

    with servers.serve() as server:
        yield server


@pytest.fixture(scope="session")
def _ec2() -> Iterator[Any]:
    from support import ec2_server as servers  # noqa: PLC0415 (seconds to import)

    with servers.serve() as server:
        yield server


@pytest.fixture
def ec2_server(_ec2: Any) -> Any:
    """One for all tests of a worker, without instances when a test begins."""
    _ec2.clear()
    return _ec2


@pytest.fixture(scope="session")
def _gce() -> Iterator[Any]:
    from support.fake_gce import FakeGce  # noqa: PLC0415 (its document is large)

    with FakeGce() as server:
        yield server


@pytest.fixture
def gce_server(_gce: Any) -> Any:
    """One for all tests of a worker, without instances when a test begins."""
    _gce.clear()
    return _gce


@pytest.fixture(scope="session")
def _kube() -> Iterator[Any]:
    from support.fake_kube import FakeKube  # noqa: PLC0415 (its library is large)

    with FakeKube() as server:
        yield server


@pytest.fixture
def kube_server(_kube: Any) -> Any:
    """One for all tests of a worker, without jobs when a test begins."""
    _kube.clear()
    return _kube


@pytest.fixture
def s3_store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty store: in a bucket of its own, or in the one that is to be tested."""
    from support import s3_server as servers  # noqa: PLC0415 (a second to import)

    url = os.environ.get("CROSSFED_TEST_S3_URL")
    if url is None:
        yield request.getfixturevalue("s3_server").store()
        return
    with servers.named_store(
        url, os.environ.get("CROSSFED_TEST_S3_ENDPOINT", "")
    ) as store:
        yield store


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Any]:
    """One for all tests of a worker; each takes a bucket of its own."""
    from support import fake_gcs  # noqa: PLC0415 (slow to import)

    with fake_gcs.FakeGcs() as server:
        yield server


@pytest.fixture
def gcs_store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty store: in a bucket of its own, or in the one that is to be tested."""
    from support import gcs_stores  # noqa: PLC0415 (slow to import)

    url = os.environ.get("CROSSFED_TEST_GCS_URL")
    if url is None:
        yield gcs_stores.store(request.getfixturevalue("gcs_server"))
        return
    with gcs_stores.named_store(
        url, os.environ.get("CROSSFED_TEST_GCS_ENDPOINT", "")
    ) as store:
        yield store


@pytest.fixture(scope="session")
def s3_proxy(s3_server: Any) -> Iterator[Any]:
    """In front of it, and breaks."""
    from support import tcp_proxy  # noqa: PLC0415

    with tcp_proxy.proxy(s3_server.url) as proxy:
        yield proxy


@pytest.fixture
def s3_line(s3_server: Any, s3_proxy: Any) -> Iterator[Any]:
    """A store behind it; see ``support.bad_lines``."""
    from support import bad_lines  # noqa: PLC0415 (slow to import)

    s3_proxy.clear()
    with bad_lines.s3_line(s3_server, s3_proxy) as line:
        yield line


@pytest.fixture(scope="session")
def gcs_proxy(gcs_server: Any) -> Iterator[Any]:
    """In front of it, and breaks."""
    from support import tcp_proxy  # noqa: PLC0415

    with tcp_proxy.proxy(gcs_server.url) as proxy:
        yield proxy


@pytest.fixture
def gcs_line(gcs_server: Any, gcs_proxy: Any) -> Iterator[Any]:
    """A store behind it; see ``support.bad_lines``."""
    from support import bad_lines  # noqa: PLC0415 (slow to import)

    gcs_proxy.clear()
    with bad_lines.gcs_line(gcs_server, gcs_proxy) as line:
        yield line


@pytest.fixture(scope="session")
def kms_server() -> Iterator[Any]:
    """One for all tests of a worker; each makes keys of its own."""
    from support import fake_kms  # noqa: PLC0415 (slow to import)

    with fake_kms.FakeKms() as server:
        yield server


@pytest.fixture(scope="session")
def flower_story(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run on Flower's simulation engine; see ``support.flower_story``."""
    from support import flower_story, toy_sites  # noqa: PLC0415 (slow to import)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(toy_sites.HOLD, str(tmp_path_factory.mktemp("played") / "hold"))
        return flower_story.tell()
