"""Hooks of mkdocs: README.md is the site's first page, a mechanism's README.md is its page, and what else pages link to
stands on the site.

In the repository links are relative to the file that has them, as GitHub follows them; the site has its own folders.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
MECHANISMS = {
    f"src/espalier/mechanisms/{path.parent.name}/README.md": f"{path.parent.name.replace('_', '-')}.md"
    for path in sorted((ROOT / "src/espalier/mechanisms").glob("*/README.md"))
}
"""The page of each mechanism, and its name on the site: tensor_parallel/README.md is tensor-parallel.md."""
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    **MECHANISMS,
}
"""Pages from outside docs/, and their names on the site."""
SOURCES = {name: source for source, name in PAGES.items()}
SEARCH = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LINK = re.compile(r"(\]\(|src=\")([^)#\"\s:]+)")


def target(page: str, link: str) -> str | None:
    """The file that a page (both from the root of the repository) links to; None where there is no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def site_path(path: str) -> str:
    """Where the file of the repository stands on the site."""
    return PAGES.get(path, path.removeprefix("docs/"))


def source(file: File) -> str:
    """The file of the repository that became a page of the site."""
    return SOURCES.get(file.src_uri, f"docs/{file.src_uri}")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/, and the files there that a page links to."""
    for path, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    linked = {
        path
        for file in files.documentation_pages()
        for _, link in LINK.findall(file.content_string)
        if (path := target(source(file), link)) and path not in PAGES and not path.startswith("docs/")
    }
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links lead to where their targets stand on the site; the search learns what .ci/site.toml says of the page."""
    name = page.file.src_uri
    page.meta["search"] = {"exclude": name.startswith(tuple(SEARCH["exclude"])), "boost": SEARCH["boost"].get(name, 1)}
    page.meta["tags"] = SEARCH["words"].get(name, [])

    def moved(link: re.Match[str]) -> str:
        path = target(source(page.file), link[2])
        if path is None:
            return link[0]
        return link[1] + posixpath.relpath(site_path(path), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)
