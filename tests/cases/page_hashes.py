"""Which pages of the docs have changed since all their blocks were run.

    python tests/cases/page_hashes.py

notes all pages as they are, once the normal suite, which runs those that have changed, has passed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path

import doc_pages

from espalier.cli import main as cli

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
NOTED = ROOT / "tests" / "docs" / "pages.json"
PAGES = {**doc_pages.PAGES, **doc_pages.MEASURED}
FENCE = re.compile(r"^ *```\w*\n.*?^ *```", re.DOTALL | re.MULTILINE)


def source(module: str) -> Path | None:
    """The file of a module, where there is one."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def sources(blocks: str) -> set[Path]:
    """The files of the verbs that blocks call, of the modules that they import, and the examples that they name."""
    verbs = set(re.findall(r"\bespalier (\w+)", blocks)) & set(cli.VERBS)
    modules = [f"espalier.cli.{verb}" for verb in verbs]
    for module, names in re.findall(r"^ *from (espalier[\w.]*) import ([\w, ]+)", blocks, re.MULTILINE):
        modules += [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
    files = {file for module in modules if (file := source(module)) is not None}
    examples = {ROOT / name for name in re.findall(r"\bexamples/[\w.-]+", blocks)}
    return files | {file for file in examples if file.is_file()}


def page_hash(page: str) -> str:
    """Of the page's blocks and of what they use."""
    blocks = "\n".join(FENCE.findall(PAGES[page].read_text(encoding="utf-8")))
    digest = hashlib.sha256(blocks.encode())
    for file in sorted(sources(blocks)):
        digest.update(b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def changed(page: str) -> bool:
    """Since the page was noted, if it was."""
    noted = json.loads(NOTED.read_text(encoding="utf-8")) if NOTED.exists() else {}
    return bool(noted.get(page) != page_hash(page))


def main() -> None:
    """See the module."""
    table = {page: page_hash(page) for page in PAGES if FENCE.search(PAGES[page].read_text(encoding="utf-8"))}
    NOTED.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
