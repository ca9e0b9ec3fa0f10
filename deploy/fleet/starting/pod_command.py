"""What the pod of a site runs: it enrols, and then works. Pure: words in, words out.

There are no secrets in it, since anyone who may list jobs can read it.
"""

import shlex
from collections.abc import Sequence

from cloud_adapters.compute.kube_manifest import STATE, USER_DATA
from deploy.fleet.starting.user_data import MachineInvitation

FOLDER = f"{STATE}/site"
# A shell that waits for a program ignores SIGTERM, which is the leave notice.
_SCRIPT = """\
set -eu
umask 077
mkdir -p {folder}
cat {settings} > {folder}/site.toml
trap 'kill "$!"; exit 143' TERM
crossfed {enrol} &
wait "$!"
trap - TERM
exec crossfed site up --config {folder}/site.toml
"""


def command(invitation: MachineInvitation) -> Sequence[str]:
    """The command of a pod whose user data is the site's ``site.toml``.

    Args:
        invitation: How it enrols.
    """
    enrol = shlex.join(invitation.words(FOLDER))
    text = _SCRIPT.format(folder=FOLDER, settings=USER_DATA, enrol=enrol)
    return ("/bin/sh", "-c", text)
