"""Python's standard library as words, masked or with the package that they come from.

Words become numbers by a hash, so there is no vocabulary to agree on, and none that
would reveal a site's words.
"""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from clients.data import preprocessing

VOCABULARY = 512
MASK, FIRST_WORD = 1, 2  # 0 is transformers' padding.
WINDOW = 48  # Words of a record.
IGNORED = -100  # The label of a word that is not masked.
PACKAGES = ("asyncio", "email", "unittest", "xml")

Columns = dict[str, NDArray[np.int64]]


@preprocessing("none")
def masked(
    part: int = 0, parts: int = 1, most: int = 1500, share: float = 0.25
) -> tuple[Columns, Columns]:
    """Windows of words, some of them masked; labels are those (BERT's task).

    Args:
        part: Number of the site, from 0.
        parts: Number of sites.
        most: Windows for training; a tenth as many are held out.
        share: Share of the words that are masked.

    Returns:
        (train, held_out): ``input_ids`` and ``labels``, both ``(n, 48)``.
    """
    rng = np.random.default_rng(part)
    train, held_out = (
        np.concatenate([_windows(p, held_out=held) for p in PACKAGES])[part::parts]
        for held in (False, True)
    )
    chosen = rng.permutation(train)[:most], rng.permutation(held_out)[: most // 10]
    first, second = (_mask(rng, words, share) for words in chosen)
    return first, second


@preprocessing("none")
def labelled(
    part: int = 0, parts: int = 1, per_class: int = 40
) -> tuple[Columns, Columns]:
    """A few windows of each package, and which one it is.

    Args:
        part: Number of the site, from 0.
        parts: Number of sites.
        per_class: Windows of each package for training, and as many held out.
    """
    rng = np.random.default_rng(part)
    sets: list[Columns] = []
    for held_out in (False, True):
        found = [
            rng.permutation(_windows(p, held_out=held_out)[part::parts])[:per_class]
            for p in PACKAGES
        ]
        labels = np.repeat(np.arange(len(found)), [len(some) for some in found])
        sets.append({"input_ids": np.concatenate(found), "labels": labels})
    return sets[0], sets[1]


def words_of(text: str) -> Iterator[int]:
    """A number for each word; those of a name count separately, signs do not."""
    for word in re.findall(r"[A-Za-z]+", text):
        yield FIRST_WORD + crc32(word.lower().encode()) % (VOCABULARY - FIRST_WORD)


def _windows(package: str, *, held_out: bool) -> NDArray[np.int64]:
    """Windows ``(n, 48)`` of a package's files; one file in five is held out."""
    root = Path(sysconfig.get_paths()["stdlib"], package)
    found = [
        list(words_of(path.read_text("utf-8")))
        for path in sorted(root.rglob("*.py"))
        if (crc32(path.relative_to(root).as_posix().encode()) % 5 == 0) == held_out
    ]
    words = np.array([word for text in found for word in text], np.int64)
    return words[: len(words) // WINDOW * WINDOW].reshape(-1, WINDOW)


def _mask(rng: np.random.Generator, words: NDArray[np.int64], share: float) -> Columns:
    hidden = rng.random(words.shape) < share
    hidden[:, 0] |= ~hidden.any(axis=1)  # Each record has a label.
    return {
        "input_ids": np.where(hidden, MASK, words),
        "labels": np.where(hidden, words, IGNORED),
    }
