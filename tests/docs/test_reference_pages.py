"""Pages that are made from the code are what the code says; README is short, and its pictures are there."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from espalier.cli import main as cli
from espalier.recipe import recipe_errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_reference_pages_are_what_the_code_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "bench" / "reference_pages.py", tmp_path], check=True)
    pages = sorted(path.name for path in tmp_path.iterdir())
    assert pages == ["command-line.md", "extras.md", "options.md", "python.md"]
    for name in pages:
        assert (DOCS / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8"), "make pages"


def test_the_page_of_the_command_line_has_every_argument_of_every_command() -> None:
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## espalier (\w+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert list(sections) == list(cli.VERBS)
    for argument in cli.ARGUMENTS:
        words = str(argument["name"]).split()
        for verb in str(argument["verbs"]).split():
            shown = words[0] if words[0].startswith("--") else words[-1] if len(words) > 1 else words[0].upper()
            assert f"{shown}" in sections[verb], (verb, argument["name"])


def test_the_index_of_options_leads_to_options_that_exist() -> None:
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    known = recipe_errors.known_keys()
    keys = [key for cell in cells for key in re.findall(r"`([a-z][\w.]+\*?)`", cell)]
    assert len(keys) > 60
    assert not [key for key in keys if not any(f"{option}.".startswith(f"{key.rstrip('.*')}.") for option in known)]


def test_every_extra_is_listed_with_its_packages() -> None:
    page = (DOCS / "extras.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", page, re.MULTILINE))
    assert {extra: cell.split(", ") for extra, cell in rows.items()} == project["optional-dependencies"]


# --- README ----------------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_each_of_its_limits_names_its_page() -> None:
    assert len(README.split()) <= 1200
    questions = re.search(r"^## Four questions\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    limits = re.search(r"^## Limits\n(.*?)^State", README, re.DOTALL | re.MULTILINE)
    assert questions is not None
    assert limits is not None
    assert len(re.findall(r"^### .+\?$", questions[1], re.MULTILINE)) == 4
    for text in (*re.split(r"^### ", questions[1], flags=re.MULTILINE)[1:], *limits[1].strip().split("\n- ")):
        assert re.search(r"\]\([^)]+\.md", text), text


PICTURES = re.findall(r'<img src="([^"]+)"', README)


def test_the_readme_has_three_pictures() -> None:
    assert len(PICTURES) == 3


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_of_the_readme_is_small_and_made_by_make_pictures(picture: str) -> None:
    data = (ROOT / picture).read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 150_000
    script = (ROOT / "bench" / "pictures.py").read_text(encoding="utf-8")
    size = re.search(rf'"{Path(picture).stem}": \("[^"]+", \((\d+), (\d+)\)\)', script)
    assert size is not None
    assert struct.unpack(">II", data[16:24]) == tuple(map(int, size.groups()))
