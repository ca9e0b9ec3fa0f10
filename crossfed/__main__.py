"""``python -m crossfed``, and the entry point of the command ``crossfed``."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    from deploy.cli import main as run  # noqa: PLC0415 -- after our rooms come first

    return run()


if __name__ == "__main__":
    sys.exit(main())
