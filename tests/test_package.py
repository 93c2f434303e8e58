"""What leaves the repository: the wheel, the site of the documentation, the notebook."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from programs import environment, known

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """The output of a program that ends with 0."""
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


# --- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="espalier[dev] is not installed")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_is_one_package_with_its_tables_and_nothing_else(wheel):
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    packaged = {path for path in names if path.parts[0] == "espalier"}
    tracked = run("git", "ls-files", "src").splitlines()
    assert packaged == {Path(name).relative_to("src") for name in tracked}
    assert {path.parts[0] for path in names - packaged} == {
        f"espalier-{importlib.metadata.version('espalier')}.dist-info"
    }


def test_the_wheel_passes_the_checks_of_the_package_index(wheel):
    pytest.importorskip("twine", reason="espalier[dev] is not installed")
    pytest.importorskip("check_wheel_contents", reason="espalier[dev] is not installed")
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    run(sys.executable, "-m", "check_wheel_contents", wheel)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_trains_in_an_empty_environment(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    recipe = '[model]\ndepth = 1\n[data]\npath = "python:stdlib"\n[train]\nsteps = 3\nbatch_tokens = 1024\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    program = python.with_name("espalier")
    assert importlib.metadata.version("espalier") in run(program, "--version", folder=tmp_path)
    run(program, "train", "recipe.toml", folder=tmp_path)
    losses = [json.loads(line) for line in (tmp_path / "runs/recipe/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in losses if event["event"] == "step"] == [1, 2, 3]


def test_the_image_takes_what_the_wheel_is_made_of():
    """The files that the Dockerfile copies are those that .dockerignore lets through, and are there."""
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    files = {name for line in copied for name in line.split()}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert files == let_through
    assert all((ROOT / name).exists() for name in files)


# --- the site --------------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """The pages that a page links to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag, attrs):
        target = dict(attrs).get("href") or ""
        if tag == "a" and ":" not in target and target.split("#")[0].endswith(".html"):
            self.found.add(target.split("#")[0])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site; a warning, which a link that leads nowhere is one of, ends the build."""
    pytest.importorskip("material", reason="espalier[docs] is not installed")
    folder = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder, NO_MKDOCS_2_WARNING="1")
    return folder


def linked(page: Path) -> set[str]:
    parser = Links()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def test_every_page_is_two_clicks_from_the_first(site):
    first = linked(site / "index.html")
    reached = first | {target for page in first for target in linked(site / page)}
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} | {"CONTRIBUTING", "CHANGELOG"}
    assert {f"{page}.html" for page in pages} <= reached


def test_the_site_is_searched_and_shown_in_light_and_dark_and_asks_nobody_else(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(entry["location"].startswith("offload.html") for entry in index["docs"])
    text = (site / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'data-md-color-scheme="(\w+)"', text)) >= {"default", "slate"}
    assert not re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="https?:', text)


# --- the notebook ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, machine, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="espalier[dev] is not installed")
    nbformat = pytest.importorskip("nbformat", reason="espalier[dev] is not installed")
    pytest.importorskip("ipykernel", reason="espalier[dev] is not installed")
    known(tmp_path, machine)
    monkeypatch.setenv("XDG_CACHE_HOME", environment(tmp_path)["XDG_CACHE_HOME"])
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    for cell in notebook.cells:  # the kernel's PATH is not that of an activated environment
        cell.source = cell.source.replace("!espalier", f"!{sys.executable} -m espalier")
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[-1].outputs[0]["data"]["text/html"]
