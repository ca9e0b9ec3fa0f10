"""Sessions of boto3 that share what they have read about AWS's services.

botocore describes each service in JSON, megabytes for EC2, and every session parses
that again: half a second of processor time for a client. A long command opens many
sessions, because each reads the credentials of its time. The descriptions come with the
library and never change while a process runs, so all sessions share them.
"""

from typing import Any

import boto3
import botocore.session
from botocore.loaders import JSONFileLoader


class _SharedDescriptions(JSONFileLoader):  # type: ignore[misc]
    """Parses each file once; clients only read what they get."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def load_file(self, file_path: str) -> Any:
        """Return what a file holds, or None if there is no such file."""
        found = self._found.get(file_path)
        if found is None:
            found = super().load_file(file_path)
            if found is not None:
                self._found[file_path] = found
        return found


_DESCRIPTIONS = _SharedDescriptions()


def new_session() -> boto3.session.Session:
    """Open a session, which reads credentials and profile from the environment.

    Raises:
        botocore.exceptions.ProfileNotFound: The profile that the environment names is
            not there.
    """
    session = botocore.session.Session()
    session.get_component("data_loader").file_loader = _DESCRIPTIONS
    return boto3.session.Session(botocore_session=session)
