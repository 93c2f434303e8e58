"""Hooks of mkdocs: README.md is the site's first page, and what else pages of docs/ link to stands on the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages from the root of the repository, and their names on the site."""


def outside(file: File) -> re.Pattern[str]:
    """Links of a page that lead out of docs/, with the path from the root of the repository."""
    depth = file.src_uri.count("/")
    return re.compile(r"\]\(" + r"\.\./" * depth + r"\.\./([^.)#][^)#]*)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root, and the files outside docs/ that a page links to."""
    linked = {
        path
        for page in files.documentation_pages()
        for path in outside(page).findall(page.content_string)
        if path not in PAGES
    }
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"(\]\(|src=\")docs/", r"\1", text)
        files.append(File.generated(config, name, content=text))
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links out of docs/ lead to the copies on the site."""
    up = "../" * page.file.src_uri.count("/")
    return outside(page.file).sub(lambda link: f"]({up}{link[1]}", markdown)
