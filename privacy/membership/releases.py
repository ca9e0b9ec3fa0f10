"""Compare two crossfed releases, and advise the operator of the older one."""

import re

_SHOWN_CHARS = 20
_VERSION = re.compile(r"[0-9][A-Za-z0-9.+!]*")


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version; 2.13.0+cpu is 2.13, and so is 2.13rc1."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    found = [int(part) for part in match[0].split(".")] if match else []
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def advice(*, site: str, here: str, there: str) -> str:
    """Advice if a site's code differs from the aggregator's; both may read it.

    Args:
        site: Name of the site.
        here: The site's release.
        there: The aggregator's; a text that came from elsewhere.
    """
    there = there[:_SHOWN_CHARS]
    if not _VERSION.fullmatch(there):  # People copy commands: it is put into none.
        there = f"names the release {there!r}"
        return f"site {site!r} runs crossfed {here}, and the aggregator {there}"
    both = f"site {site!r} runs crossfed {here} and the aggregator {there}"
    install = "pip install 'crossfed[flower]=={}'"
    if numbers(here) < numbers(there):
        command = install.format(there)
        return f"{both}: upgrade the site ({command}) and start its agent again"
    if numbers(here) > numbers(there):
        command = install.format(here)
        return f"{both}: upgrade the aggregator ({command}) and start it again"
    if here == there:
        return (
            f"site {site!r} and the aggregator both run crossfed {here}, but not the "
            "same code: install the released package on both sides, unchanged"
        )
    return f"{both}: install the same one on both sides"
