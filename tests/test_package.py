"""What leaves the repository: the wheel, the site of the documentation, the notebook."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from doc_pages import PAGES
from programs import environment, known

from espalier.recipe.errors import DISTRIBUTION

ROOT = Path(__file__).parents[1]


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
    pytest.importorskip("hatchling", reason="espalier-train[dev] is not installed")
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
        f"espalier_train-{importlib.metadata.version(DISTRIBUTION)}.dist-info"
    }


def test_the_wheel_passes_the_checks_of_the_package_index(wheel):
    pytest.importorskip("twine", reason="espalier-train[dev] is not installed")
    pytest.importorskip("check_wheel_contents", reason="espalier-train[dev] is not installed")
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
    assert importlib.metadata.version(DISTRIBUTION) in run(program, "--version", folder=tmp_path)
    run(program, "train", "recipe.toml", folder=tmp_path)
    losses = [json.loads(line) for line in (tmp_path / "runs/recipe/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in losses if event["event"] == "step"] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_uvx_runs_the_wheel_without_installing_it(wheel, tmp_path):
    """`uvx` is `uv tool run`. It takes the packages where pip does, but does not read pip's settings itself."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("there is no uv: pip install uv")
    listed = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    told = {name.rpartition(".")[2]: value.strip("'") for name, _, value in (line.partition("=") for line in listed)}
    settings = {
        "UV_DEFAULT_INDEX": told.get("index-url", ""),
        "UV_INDEX": told.get("extra-index-url", ""),
        "UV_FIND_LINKS": told.get("find-links", ""),
        "SSL_CERT_FILE": told.get("cert", ""),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_CONSTRAINT": str(ROOT / "constraints.txt"),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
    }
    given = {name: value for name, value in settings.items() if value}
    command = (uv, "tool", "run", "--from", wheel, "espalier")
    assert importlib.metadata.version(DISTRIBUTION) in run(*command, "--version", folder=tmp_path, **given)
    assert "Acme" in run(*command, "explain", "acme", folder=tmp_path, **given)


def test_the_image_takes_what_the_wheel_is_made_of():
    """The files that the Dockerfile copies are those that .dockerignore lets through, and are there."""
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    files = {name for line in copied for name in line.split()}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert files == let_through
    assert all((ROOT / name).exists() for name in files)


INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN"),
    *("SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
"""Of a Dockerfile (Docker's reference)."""


def test_the_image_s_file_is_well_formed():
    """What can be said of a Dockerfile without building it: its instructions, its shell, its names."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    steps = [line.partition(" ")[::2] for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]
    words = [word for word, _ in steps]
    assert set(words) <= INSTRUCTIONS
    start = words.index("FROM")
    assert set(words[:start]) <= {"ARG"}
    for word, given in steps:
        if word == "RUN":
            run("sh", "-n", "-c", given)
            assert "apt-get install" not in given or "apt-get update" in given  # else from a layer of another day
        if word == "WORKDIR":
            assert given.startswith("/")
    declared = {given.partition("=")[0] for word, given in steps[:start] if word == "ARG"}
    assert set(re.findall(r"\$\{(\w+)\}", steps[start][1])) <= declared
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (program,) = (json.loads(given) for word, given in steps if word == "ENTRYPOINT")
    assert program[0] in project["scripts"]
    (extras,) = re.findall(r"'\.\[(.+?)\]'", " ".join(given for _, given in steps))
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert [given for word, given in steps if word == "USER"][-1] != "root"


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
    pytest.importorskip("material", reason="espalier-train[docs] is not installed")
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
    pages = {Path(name).stem for name in PAGES} - {"README"} | {"CONTRIBUTING", "CHANGELOG"}
    assert "tensor-parallel" in pages
    assert {f"{page}.html" for page in pages} <= reached


def test_the_site_is_searched_and_shown_in_light_and_dark_and_asks_nobody_else(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(entry["location"].startswith("offload.html") for entry in index["docs"])
    assert (site / "search" / "search_index.js").is_file()  # of a page that was opened from a folder
    assert (site / "javascripts" / "iframe-worker.js").is_file()
    text = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="javascripts/iframe-worker.js"' in text
    assert set(re.findall(r'data-md-color-scheme="(\w+)"', text)) >= {"default", "slate"}
    assert not re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="https?:', text)


QUESTIONS = {
    "learning rate": "options",
    "resume a run": "getting-started recipe",
    "out of memory": "options offload",
    "use two machines": "hosts clusters",
    "fine-tune a chat model": "tune",
    "LoRA": "tune",
    "export to ollama": "tune",
    "predict": "command-line",
    "graph csv": "graph data",
    "several GPUs": "gpu",
    "slurm": "clusters",
    "checkpoint format": "faults recipe",
    "tensorboard": "options",
    "stop early": "options getting-started",
    "mixed precision": "options planner",
    "nerf": "scenes",
    "kubernetes": "clusters",
    "batch size": "options",
    "what does plan mean": "planner",
    "install": "getting-started",
}
"""What a newcomer types, and the pages one of which has the answer."""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_search_finds_the_right_page_first(site):
    """The theme's own search program over the site's index, as in a browser."""
    import material

    (worker,) = Path(material.__file__).parent.glob("templates/assets/javascripts/workers/search.*.min.js")
    command = ["node", ROOT / "tests/cases/search_site.js", worker, site / "search/search_index.json"]
    done = subprocess.run(
        command, input=json.dumps(list(QUESTIONS)), capture_output=True, text=True, timeout=60, check=True
    )
    answers = json.loads(done.stdout)
    first = {question: answers[question][0][0][0].partition(".html")[0] for question in QUESTIONS}
    wrong = {question: first[question] for question, pages in QUESTIONS.items() if first[question] not in pages.split()}
    assert len(wrong) <= 2, wrong
    places = {place for pages in answers.values() for page in pages for place, _ in page}
    assert not [place for place in places if place.startswith(("CHANGELOG", "systems", "measured/"))]
    assert answers["learning rate"][0][0][0] == "options.html#learning-rate"


# --- the notebook ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, machine, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="espalier-train[dev] is not installed")
    nbformat = pytest.importorskip("nbformat", reason="espalier-train[dev] is not installed")
    pytest.importorskip("ipykernel", reason="espalier-train[dev] is not installed")
    known(tmp_path, machine)
    monkeypatch.setenv("XDG_CACHE_HOME", environment(tmp_path)["XDG_CACHE_HOME"])
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    for cell in notebook.cells:  # the kernel's PATH is not that of an activated environment
        cell.source = cell.source.replace("!espalier", f"!{sys.executable} -m espalier")
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[-1].outputs[0]["data"]["text/html"]


def test_every_hint_names_this_distribution_and_an_extra_that_it_has():
    """`pip install espalier` would bring a stranger's program."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    names = [name for name in run("git", "ls-files").splitlines() if not name.startswith(("docs/measured/", "tests/"))]
    texts = {name: (ROOT / name).read_text(errors="ignore") for name in names if (ROOT / name).is_file()}
    for name, text in texts.items():
        hints = re.findall(r"pip install [^\n]*?\b(espalier(?:-train)?)(?:\[([\w,-]+)\])?(?=['\"` ),;\n])", text)
        hints += re.findall(r"\b(espalier(?:-train)?)\[([\w,-]+)\]", text)
        for distribution, extras in hints:
            assert distribution == DISTRIBUTION, name
            assert {extra for extra in extras.split(",") if extra} <= set(project["optional-dependencies"]), name
    simulators = tomllib.loads((ROOT / "accelerators" / "pyproject.toml").read_text())["project"]
    assert [name for name in simulators["dependencies"] if name.startswith("espalier")] == [DISTRIBUTION]
    assert sum(f"{DISTRIBUTION}[" in text for text in texts.values()) > 4
    wanted = re.findall(r"missing_extra\([^,]+, \"([\w-]+)\"", "".join(texts.values()))
    assert len(set(wanted)) > 3
    assert set(wanted) <= set(project["optional-dependencies"])
