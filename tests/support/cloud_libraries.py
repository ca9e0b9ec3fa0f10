"""What forks that talk to fake clouds would each import and parse for a second.

``forked.Server.imports`` has a server of forks import it, for tests with many of them.
"""

from cloud_adapters.compute import gce  # noqa: F401
from cloud_adapters.net import aws_session

for _service in ("ec2", "ssm", "sts"):
    aws_session.new_session().client(
        _service,
        region_name="us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",  # noqa: S106
    )
