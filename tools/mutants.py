"""Put faults into a copy of the code, one at a time, and see that tests find them.

    python tools/mutants.py [NAME ...] [--list]

The faults are in ``tests/mutants.toml``: defects that were found once, and changes that
no test noticed. Each names the tests that must fail. Exit code 1 if any fault survives.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
TIMEOUT_SECONDS = 600
_TESTS_FAILED = 1  # What pytest ends with.


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A fault.

    Attributes:
        name: What is wrong, in a few words.
        file: The file it is put into.
        old: Text that stands there once.
        new: What takes its place.
        tests: Arguments of pytest; at least one of these tests must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: ``old`` does not stand there exactly once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"mutant {self.name!r}: {self.file} has {text.count(self.old)} times "
                f"{self.old!r}, not once; update tests/mutants.toml"
            )
        return text.replace(self.old, self.new)


def load() -> list[Mutant]:
    """Read the table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def run(mutant: Mutant, copy: Path) -> tuple[str, str]:
    """Run a mutant's tests on it in a copy of the repository.

    Returns:
        "killed", "SURVIVED" or "BROKEN" (no test could run), and pytest's last line.
    """
    target = copy / mutant.file
    sound = target.read_text(encoding="utf-8")
    target.write_text(mutant.applied(copy), encoding="utf-8")
    try:
        done = subprocess.run(  # noqa: S603 -- our own interpreter and tests
            [sys.executable, "-m", "pytest", "-x", "-q", "-n0", *mutant.tests],
            cwd=copy,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed", f"a test was still waiting after {TIMEOUT_SECONDS} s"
    finally:
        target.write_text(sound, encoding="utf-8")
    verdict = {0: "SURVIVED", _TESTS_FAILED: "killed"}.get(done.returncode, "BROKEN")
    return verdict, (done.stdout.strip().splitlines() or [done.stderr])[-1]


def main() -> int:
    """Run the mutants that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a name")
    parser.add_argument("--list", action="store_true", help="show them and stop")
    options = parser.parse_args()
    chosen = [
        mutant
        for mutant in load()
        if not options.names or any(part in mutant.name for part in options.names)
    ]
    if options.list:
        print("\n".join(f"{mutant.name}: {mutant.file}" for mutant in chosen))
        return 0
    survived = 0
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        tracked = subprocess.run(
            ["git", "ls-files", "-z"],  # noqa: S607 -- git of the machine
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        for file in filter(None, tracked):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
        for mutant in chosen:
            begin = time.monotonic()
            verdict, last = run(mutant, copy)
            survived += verdict != "killed"
            seconds = time.monotonic() - begin
            print(f"{verdict:<9}{seconds:6.1f} s  {mutant.name}  [{last}]", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
