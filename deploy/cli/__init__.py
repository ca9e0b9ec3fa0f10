"""The command line."""

from deploy.cli.commands import main

__all__ = ["main"]
