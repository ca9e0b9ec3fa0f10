"""Run a command and show only the lines of its output that matter.

``brief.py PATTERN COMMAND...`` prints lines that PATTERN finds. In a terminal, each of
the others replaces the one before, so that a person sees progress. All of them are
printed if the command fails, and its exit code is returned.
"""

import re
import shutil
import subprocess
import sys

CLEAR = "\r\033[K"


def main(pattern: str, *command: str) -> int:
    """Run the command; return its exit code."""
    shows = re.compile(pattern).search
    in_place = sys.stdout.isatty()
    hidden = []
    with subprocess.Popen(  # noqa: S603 -- a line of the Makefile
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None  # noqa: S101
        for line in map(str.rstrip, process.stdout):
            if shows(line):
                print(CLEAR * in_place + line, flush=True)
                continue
            hidden.append(line)
            if in_place:
                width = shutil.get_terminal_size().columns - 1
                print(CLEAR + line[:width], end="", flush=True)
    print(CLEAR * in_place, end="")
    if process.returncode:
        print(*hidden, sep="\n")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
