"""What commands say."""

import json
import math

import pytest

from deploy import terminal
from federation.typed_json import refuse_constant


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]):
    """Nor an infinity, however deep: no other program could read it."""
    terminal.say_json({"rows": [{"loss": math.nan}, (math.inf, 1.0)]})
    found = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert found == {"rows": [{"loss": "NaN"}, ["Infinity", 1.0]]}
