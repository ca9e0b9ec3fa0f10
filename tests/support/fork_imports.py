"""What ``forked.Server`` has imported before it forks.

Nothing here uses most of these: the forks are three seconds shorter for what a run
imports where it first needs it.
"""

import rich.live  # noqa: F401
import sklearn.datasets  # noqa: F401

# PEFT imports it, and what it imports, in the forks that use it.
import torch._dynamo  # noqa: F401
from support import misfortunes  # noqa: F401

import deploy.cli.commands  # noqa: F401
import monitoring.pages.comparison  # noqa: F401
from monitoring.pages.report import environment

# The first page of a process compiles its templates.
for _page in environment().list_templates(["j2"]):
    environment().get_template(_page)
