"""Columns that follow from others, record by record: of texts and of images.

A job asks about them by name. Of a column of texts ``note``: ``note.length``, its
characters, and ``note.has.WORD``, 1 where the word is in it and 0 where it is not. Of
images ``(n, channels, height, width)``, called ``inputs`` unless the data name them:
``inputs.channel.0``, the mean of a channel's pixels,
``inputs.channel.0.square``, that of their squares, ``inputs.height`` and
``inputs.width``. Pixels of uint8 are divided by 255, as for models.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.tables import Column, Words

_OF_TEXT = re.compile(r"(?P<base>.+)\.(length|has\.(?P<word>.+))")
_OF_IMAGES = re.compile(
    r"(?P<base>.+)\.(?P<what>height|width|channel\.(?P<at>\d+)(?P<square>\.square)?)"
)
_WORD = re.compile(r"\w+")
_AXES = 4
_AT_ONCE = 1024


def derived(known: Mapping[str, Column], name: str) -> NDArray[np.float64] | None:
    """Compute a derived column; None if no column has this name."""
    for form, make in ((_OF_TEXT, _of_text), (_OF_IMAGES, _of_images)):
        match = form.fullmatch(name)
        base = None if match is None else known.get(match["base"])
        if match is not None and base is not None:
            found = make(base, match)
            if found is not None:
                return found
    return None


def _of_text(column: Column, match: "re.Match[str]") -> NDArray[np.float64] | None:
    if not isinstance(column, Words):
        could_be_text = column.ndim == 1 and column.dtype.kind == "f"
        is_missing = could_be_text and np.isnan(column).all()
        return column.astype(np.float64) if is_missing else None
    word = (match["word"] or "").casefold()
    of_value = [
        float(word in _WORD.findall(text.casefold()) if word else len(text))
        for text in column.values
    ]
    return np.array([*of_value, np.nan])[column.codes]


def _of_images(column: Column, match: "re.Match[str]") -> NDArray[np.float64] | None:
    if isinstance(column, Words) or column.ndim != _AXES:
        return None
    size, channels, height, width = column.shape
    if match["at"] is None:
        pixels = height if match["what"] == "height" else width
        return np.full(size, float(pixels))
    at = int(match["at"])
    if at >= channels:
        return None
    found = np.empty(size)
    for start in range(0, size, _AT_ONCE):
        part: NDArray[Any] = column[start : start + _AT_ONCE, at].astype(np.float64)
        part /= 255 if column.dtype == np.uint8 else 1
        found[start : start + _AT_ONCE] = (part**2 if match["square"] else part).mean(
            axis=(1, 2)
        )
    return found
