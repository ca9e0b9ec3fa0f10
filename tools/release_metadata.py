"""What a release says of itself: its addresses, and a description whose links work.

hatchling runs this when it builds. The project has no public address of its own, so
``make dist URL=https://HOST/OWNER/NAME`` names where a release is published. Without
one, metadata has no addresses, and links into the repository become plain text.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"(!\[[^\]]*\])\((?!https?:)([^)]*)\)\s*")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]*)\)")
_WITHIN = re.compile(r"//[^/]*@")  # A name and a token, which no log may hold.
# A host and a path, without what would end a link: no user, query, space or bracket.
_REPOSITORY = re.compile(r"https://[\w.:-]+/[\w.~/-]*[\w.~-]/*")


class ReleaseMetadata(MetadataHookInterface):
    """Sets ``readme`` and ``urls``, which ``pyproject.toml`` calls dynamic."""

    def update(self, metadata: dict[str, object]) -> None:
        """Take the address from the environment's ``CROSSFED_URL``.

        Raises:
            ValueError: If that names no repository; see ``repository``.
        """
        url = repository(os.environ.get("CROSSFED_URL", ""))
        version = str(metadata["version"])
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["urls"] = addresses(url, version)
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": description(text, url, version),
        }


def repository(given: str) -> str:
    """The repository's address without a slash at its end, or '' if there is none.

    Raises:
        ValueError: If it is not an https address with a path, or has more, as a token
            that `git remote` may have and everyone who installs the release would see.
    """
    if given and _REPOSITORY.fullmatch(given) is None:
        raise ValueError(
            f"URL={_WITHIN.sub('//...@', given)} does not name a repository: "
            "expected https://HOST/OWNER/NAME, as a browser shows it"
        )
    return given.rstrip("/")


def addresses(url: str, version: str) -> dict[str, str]:
    """Those of a release by the labels that package indexes know; none without one."""
    if not url:
        return {}
    files = f"{url}/blob/v{version}"
    return {
        "Homepage": url,
        "Documentation": f"{files}/docs/README.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


def description(text: str, url: str, version: str) -> str:
    """The README as an index shows it: links lead to the files of this release.

    Links within the page stay. Without a URL there is nowhere to lead to: a link
    becomes its text, and pictures go.
    """
    if not url:
        return _LINK.sub(r"\1", _PICTURE.sub("", text))
    text = _PICTURE.sub(rf"\1({url}/raw/v{version}/\2)\n\n", text)
    return _LINK.sub(rf"[\1]({url}/blob/v{version}/\2)", text)
