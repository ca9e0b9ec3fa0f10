"""Sessions of boto3 that share what they have read about AWS's services.

botocore describes each service in JSON, megabytes for EC2. Every session looks through
400 folders of such files and parses what it needs: half a second of processor time for
a first client, and a tenth for one of S3. A long command opens many sessions, because
each reads the credentials of its time. The descriptions come with the library and never
change while a process runs, so all sessions share them.
"""

import functools
from typing import Any

import boto3
import botocore.session
from botocore.loaders import create_loader


def new_session() -> boto3.session.Session:
    """Open a session, which reads credentials and profile from the environment.

    Raises:
        botocore.exceptions.ProfileNotFound: The profile that the environment names is
            not there.
    """
    session = botocore.session.Session()
    loader = _loader(session.get_config_variable("data_path"))
    session.register_component("data_loader", loader)
    opened = boto3.session.Session(botocore_session=session)
    # Each session of boto3 adds its own folder, again.
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)
    return opened


@functools.cache
def _loader(search_path: str | None) -> Any:
    """Finds and parses each file once; clients only read what they get.

    Args:
        search_path: Further folders to look in, from ``AWS_DATA_PATH``.
    """
    return create_loader(search_path)
