"""Frozen runs of secure aggregation, from the contract to the sum.

``python tests/vectors/generate_xsa.py`` compares the file with what the product
makes and exits 1 on a difference; ``--update-vectors`` writes. A difference means
that old and new releases cannot take part in one run: raise the suite, and review
the diff. A second implementation, ``support.xsa_reference``, must give the same.

A vector is ``inputs``, the whole entropy of a run among them, and ``trace``, every
value on the way; bytes are hexadecimal.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Run as a script: the tests' packages are in the folder above.
sys.path[:0] = [str(Path(__file__).parents[1])]

from support.xsa_inputs import xsa_inputs  # noqa: E402
from support.xsa_product import product_trace  # noqa: E402

XSA_V2 = Path(__file__).with_name("xsa_v2.json")

Json = dict[str, Any]


def xsa_vectors() -> dict[str, Json]:
    """Make every vector."""
    return {
        name: {"inputs": inputs, "trace": product_trace(inputs)}
        for name, inputs in xsa_inputs().items()
    }


def main() -> int:
    """Compare or write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update-vectors", action="store_true")
    text = json.dumps(xsa_vectors(), indent=1) + "\n"
    if parser.parse_args().update_vectors:
        XSA_V2.write_text(text, encoding="ascii")
        return 0
    same = XSA_V2.read_text(encoding="ascii") == text
    sys.stderr.write(f"{XSA_V2.name}: {'same' if same else 'DIFFERENT'}\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
