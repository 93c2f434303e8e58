"""Every fenced block of README.md, docs/ and the mechanisms' pages works as printed.

The blocks of a page run in order, in one folder. A comment before a block, which no reader sees, says what else to do:

    <!-- file: NAME -->      the block is the file NAME of that folder
    <!-- part of: PATH -->   the block is an excerpt of a file of the repository
    <!-- slow: REASON -->    it runs in the slow suite
    <!-- not run: REASON --> it needs what a test has not: hosts, a cluster, a download

The normal suite runs pages whose blocks, or the sources of the verbs that they show, have changed since they were noted
(`page_hashes`); the slices of the slow suite run all.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import doc_pages
import page_hashes
import pytest
from programs import environment, forked, known, with_tokens

from espalier.cli import main as cli
from espalier.machine import cluster
from espalier.ops import rules
from espalier.recipe import recipe_errors, recipe_file

ROOT = Path(__file__).parents[2]
PAGES = {**doc_pages.PAGES, **doc_pages.MEASURED}
MARKS = ("file", "part of", "slow", "not run")
LANGUAGES = {"bash", "python", "toml", "json", "text", "diff", "yaml"}
FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>[a-z ]+): (?P<value>[^\n]+?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)
FAILURE_IS_AN_ANSWER = {"diagnose"}
"""Verbs whose exit code is 1 when they have found something."""
OWN = {
    "codecs.md": 1,
    "faults.md": 1,
    "few-bits.md": 3,
    "graph.md": 1,
    "halo-exchange.md": 2,
    "kernels.md": 1,
    "local-rounds.md": 2,
    "pattern-attention.md": 1,
    "pipeline.md": 2,
    "planner.md": 1,
    "scenes.md": 1,
    "sparse.md": 5,
    "store.md": 3,
    "task-waves.md": 1,
    "tensor-parallel.md": 2,
}
"""Python blocks of each page that are run as printed."""


class Block(NamedTuple):
    """A fenced block: the line where it begins, and the comment before it."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    value: str

    @property
    def place(self) -> str:
        return f"{self.page}, line {self.line}"


def blocks_of(page: str) -> list[Block]:
    text = PAGES[page].read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            textwrap.dedent(found["text"]),
            found["mark"] or "",
            found["value"] or "",
        )
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def lines_of(block: Block) -> Iterator[list[str]]:
    """The words of each command, without its comment."""
    assert "\\\n" not in block.text, f"{block.place}: a command is one line"
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def ids(block: Block) -> str:
    return f"{block.page}:{block.line}"


# --- what is not run is at least well formed ---------------------------------------------------------------------


def test_every_block_says_its_language_and_no_mark_is_misspelt() -> None:
    assert len(BLOCKS) > 60
    assert not [ids(one) for one in BLOCKS if one.language not in LANGUAGES or one.mark not in ("", *MARKS)]
    assert all(one.value.strip() for one in BLOCKS if one.mark)


@pytest.mark.parametrize("page", PAGES)
def test_no_command_stands_outside_a_fence(page: str) -> None:
    """An indented command would not be tested."""
    outside = FENCE.sub("", PAGES[page].read_text(encoding="utf-8"))
    found = re.findall(r"^ {4,}(?:\$ )?(?:espalier|python|torchrun|mpiexec|make|pip|srun|sbatch) .*$", outside, re.M)
    assert not found


def espalier_words(words: list[str]) -> list[str] | None:
    """The words after `espalier` of a command that starts it in one way or another."""
    if "espalier" not in words or words[0] in ("pip", "git", "apt-get"):
        return None
    words = words[words.index("espalier") + 1 :]
    return words[: words.index(">")] if ">" in words else words


def understood(words: list[str]) -> argparse.Namespace:
    """The parsed command. Raises SystemExit or AssertionError where a flag or a key does not exist."""
    parsed, rest = cli.parsers()[0].parse_known_args(words)  # changes may stand behind options
    assert not [word for word in rest if word.startswith("-") or "=" not in word], rest
    known = recipe_errors.known_keys()
    for text in [*getattr(parsed, "overrides", []), *rest]:
        key = text.partition("=")[0]
        assert any(one == key or one.startswith(f"{key}.") for one in known), f"no option {key}"
    return parsed


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "bash"], ids=ids)
def test_every_command_shown_is_understood(block: Block) -> None:
    for words in lines_of(block):
        called = espalier_words(words)
        if called is not None:
            understood(called)
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words
        elif words[0] == "python":
            check_script(words)


def check_script(words: list[str]) -> None:
    """A script of the repository with flags that it has."""
    script = ROOT / words[1]
    assert script.is_file(), words
    source = script.read_text(encoding="utf-8") + (ROOT / "bench" / "table.py").read_text(encoding="utf-8")
    named = [word for word in words[2:] if word.startswith("--")]
    known = {f"--{name}" for name in re.findall(r"\b(\w+)=\{", source)}  # options given to table.arguments
    missing = [word for word in named if word not in known and word not in source and f'"{word[2:]}"' not in source]
    assert not missing, words


SPANS = [
    pytest.param(span, id=f"{page}:{span[:60]}")
    for page in PAGES
    for span in dict.fromkeys(re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[page].read_text(encoding="utf-8"))))
]


RECORDED = {
    span
    for page in doc_pages.MEASURED.values()
    for span in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
}
"""Commands as they were when something was measured."""


def test_every_command_within_a_sentence_is_understood() -> None:
    """The verb and the flags exist; what is in capitals or brackets stands for something."""
    verbs = {
        name: made
        for action in cli.parsers()[0]._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, made in action.choices.items()
    }
    seen = 0
    for span in (one.values[0] for one in SPANS):
        assert isinstance(span, str)
        words = span.replace("[", " ").replace("]", " ").split()
        if not words:  # an empty list
            continue
        if words[0] == "python" and len(words) > 1 and words[1].startswith("bench/") and span not in RECORDED:
            check_script(words)
        if words[0] != "espalier" or len(words) == 1 or words[1].startswith("--"):
            continue
        assert words[1] in verbs, span
        flags = {flag for action in verbs[words[1]]._actions for flag in action.option_strings}
        assert not [word for word in words[2:] if word.startswith("--") and word.partition("=")[0] not in flags], span
        seen += 1
    assert seen > 30


def test_every_option_that_is_set_within_a_sentence_exists() -> None:
    known, seen = recipe_errors.known_keys(), 0
    sections = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
    for span in (one.values[0] for one in SPANS):
        assert isinstance(span, str)
        for key in re.findall(rf"(?<![\w./])((?:{sections})(?:\.\w+)+) ?=(?!=)", span):
            assert any(one == key or one.startswith(f"{key}.") for one in known), span
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (PAGES[page].parent / path) if path else PAGES[page]
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(file: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "toml"], ids=ids)
def test_every_table_shown_is_read(block: Block, tmp_path: Path) -> None:
    table = tomllib.loads(block.text)
    if "nodes" in table:
        assert cluster.loads(block.text).devices
    elif "rule" in table:
        (tmp_path / "mine.toml").write_text(block.text, encoding="utf-8")
        assert rules.read(tmp_path / "mine.toml")
    elif table.get("model", {}).get("kind") != "curve":  # tests/docs/test_docs_workloads.py
        assert recipe_file.from_table(table, block.place).name is not None or "name" not in table


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.mark == "part of"], ids=ids)
def test_an_excerpt_is_in_its_file(block: Block) -> None:
    whole = (ROOT / block.value).read_text(encoding="utf-8")
    assert block.text.strip() in textwrap.dedent(whole)


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "python"], ids=ids)
def test_every_program_shown_compiles_and_what_it_imports_is_there(block: Block) -> None:
    tree = ast.parse(block.text, block.place)
    if "torch_geometric" in block.text and block.mark == "not run":
        pytest.importorskip("torch_geometric")
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imported, []), block.place, "exec"), {})


# --- what runs ---------------------------------------------------------------------------------------------------


def written(page: str, folder: Path) -> None:
    """The files that a reader of the page has or makes."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks_of(page):
        if block.mark == "file":
            (folder / block.value).write_text(block.text, encoding="utf-8")


def run_python(block: Block, names: dict[str, Any]) -> None:
    """In this process, with a port that nobody else has."""
    text = re.sub(r'(TCPStore\("127.0.0.1", )\d+(, .*is_master=True)', r"\g<1>0\2", block.text)
    exec(compile(text, block.place, "exec"), names)


def run_command(words: list[str], folder: Path) -> None:
    """As a fork of this process."""
    called = espalier_words(words)
    assert called is not None, words
    done = forked(folder, *(one for word in called for one in (sorted(_glob(folder, word)) or [word])))
    assert done.returncode in ((0, 1) if called[0] in FAILURE_IS_AN_ANSWER else (0,)), done.stderr + done.stdout
    if ">" in words:
        (folder / words[words.index(">") + 1]).write_text(done.stdout, encoding="utf-8")


def _glob(folder: Path, word: str) -> list[str]:
    return [path.name for path in folder.glob(word)] if "*" in word else []


RUN = [
    page
    for page in PAGES
    if any(one.mark == "" and one.language in ("bash", "python") for one in blocks_of(page)) and page != "workloads.md"
]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page_hashes.changed(page) else pytest.mark.slow) for page in RUN]
)
def test_a_page_runs_as_printed(
    page: str, tmp_path: Path, machine: dict[str, Any], tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(page, tmp_path)
    known(tmp_path, machine)
    with_tokens(tmp_path, tokens)
    names: dict[str, Any] = {"__name__": page}
    ran = 0
    for block in blocks_of(page):
        if block.mark == "" and block.language == "python":
            run_python(block, names)
            ran += 1
        elif block.mark == "" and block.language == "bash":
            for words in lines_of(block):
                run_command(words, tmp_path)
    assert ran == OWN.get(page, 0)


SLOW = [page for page in PAGES if any(one.mark == "slow" for one in blocks_of(page))]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", SLOW)
def test_a_page_runs_as_printed_in_a_shell(page: str, tmp_path: Path) -> None:
    """What takes minutes: measuring, training, and what is done with a trained run."""
    written(page, tmp_path)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = {"bash": ["bash", "-e", "-c"], "python": [sys.executable, "-c"]}
    for block in blocks_of(page):
        if block.mark in ("", "slow") and block.language in program:
            done = subprocess.run(
                [*program[block.language], block.text], cwd=tmp_path, env={**environment(tmp_path), "PATH": path},
                capture_output=True, text=True, timeout=1000, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{block.place}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
