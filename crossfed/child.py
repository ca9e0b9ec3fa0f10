"""A process of ours: ``python -P -m crossfed.child MODULE ARGUMENTS``.

Our packages come first in it, whatever ``PYTHONPATH`` holds.
"""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
