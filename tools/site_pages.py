"""Pages and navigation of the documentation's site, for MkDocs (``make docs-site``).

Pages link to each other, to the code and to examples by their paths in the repository.
So the site has those paths too: no page is copied, and links are the same everywhere.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
START = "docs/README.md"  # Its lists are the navigation.
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)(?:#[^)\s]*)?\)")

Nav = list[dict[str, Any]]


def links(page: Path) -> Iterator[tuple[str, Path]]:
    """Text and target of each link of a page to a file of the repository."""
    text = _FENCED.sub("", page.read_text("utf-8"))
    for title, target in _LINK.findall(text):
        path = (page.parent / target).resolve()
        if "://" not in target and path.is_file() and path.is_relative_to(ROOT):
            yield " ".join(title.split()), path


def reachable(starts: list[Path]) -> set[Path]:
    """These files, and all that pages among them link to."""
    found, waiting = set[Path](), list(starts)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            if path.suffix == ".md":
                waiting += [target for _, target in links(path)]
    return found


def entry(title: str, path: Path) -> dict[str, Any]:
    """A page, or a folder whose first page lists the others."""
    name = path.relative_to(ROOT).as_posix()
    if path.name != "README.md" or not path.is_file():
        return {title: name}  # MkDocs names pages that are missing.
    listed = re.findall(r"^- .+", path.read_text("utf-8"), re.MULTILINE)
    found = _LINK.findall("\n".join(listed))
    pages = [entry(text, path.parent / target) for text, target in found]
    beside = pages and all("/" not in target for _, target in found)
    return {title: [{"Overview": name}, *pages]} if beside else {title: name}


def navigation(page: Path) -> Nav:
    """The headings of a page, and the links in the lists below each."""
    nav: Nav = [{"Home": "README.md"}]
    levels: list[Nav] = [nav]
    for block in re.split(r"^(?=##+ )", page.read_text("utf-8"), flags=re.MULTILINE):
        heading = re.match(r"(##+) (.+)\n", block)
        items = [block]  # What stands before the first heading.
        if heading:
            del levels[len(heading[1]) - 1 :]
            below: Nav = []
            levels[-1].append({heading[2]: below})
            levels.append(below)
            items = re.findall(r"^- .+(?:\n  .+)*", block, re.MULTILINE)
        for title, target in _LINK.findall("\n".join(items)):
            name = " ".join(title.split())
            path = (page.parent / target).resolve()
            levels[-1].append(entry(name[0].upper() + name[1:], path))
    return nav


def on_config(config: Any) -> Any:
    """Take the navigation from the documentation's first page."""
    config.nav = navigation(ROOT / START)
    return config


def _on_files(files: Any, *, config: Any) -> Any:
    docs = Path(config.docs_dir)
    starts = [ROOT / "README.md", *docs.rglob("*.md"), *docs.rglob("*.ipynb")]
    names = [path.relative_to(ROOT).as_posix() for path in sorted(reachable(starts))]
    place = config.site_dir, config.use_directory_urls
    theme = [each for each in files if each.src_dir != config.docs_dir]
    return Files([*theme, *(File(name, str(ROOT), *place) for name in names)])


# Before the plugin for notebooks, which replaces the files of those.
on_files = event_priority(100)(_on_files)
