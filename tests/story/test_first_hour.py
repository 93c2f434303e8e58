"""A newcomer's first hour: `espalier init` for what lies there, then nothing but the commands that are printed, then
the run in an empty folder, as on another machine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from programs import MACHINE, forked

import espalier
from espalier.cli import eval, export, init, open_run, plan, predict, train  # noqa: F401
from espalier.graph import workload_row as _graphs  # noqa: F401 - loaded once, before programs are forked
from espalier.language import workload_row as _language  # noqa: F401
from espalier.module import workload as _modules  # noqa: F401

MINE = Path(__file__).parents[2] / "examples" / "mine.py"
COMMAND = re.compile(r"espalier ((?:plan|train|predict|eval|export) [^\n]*?)(?=, then|$)", re.MULTILINE)
SHORT = ("train.steps=3", "plan.trial=false", "plan.pin.ranks=1")
TEXT = ("train.sequence=16", "train.batch_tokens=64", "train.validate_tokens=64")


class Story(NamedTuple):
    """`bring`: lays what the newcomer has into a folder. `paths`: of `espalier init`. `options`: what is changed in its
    recipe, so that it ends soon. `words`: what must be said after training."""

    bring: Callable[[Path], None]
    paths: tuple[str, ...]
    options: tuple[str, ...] = ()
    words: tuple[str, ...] = ("evaluate", "report")


def text(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for number in range(12):
        (folder / "corpus" / f"{number}.txt").write_text(f"The number {number} comes before {number + 1}.\n" * 40)


def lines(folder: Path) -> None:
    rows = [json.dumps({"text": f"{number} and {number} are {2 * number}."}) for number in range(400)]
    (folder / "sums.jsonl").write_text("\n".join(rows) + "\n")


def graph(folder: Path) -> None:
    """Of 40 nodes with names; a node's first feature tells its class."""
    (folder / "friends").mkdir()
    rows = [f"n{i},{('cat', 'dog')[i % 2]},{i % 2}.5,{i % 5}" for i in range(40)]
    (folder / "friends" / "nodes.csv").write_text("id,label,size,age\n" + "\n".join(rows) + "\n")
    pairs = [f"n{i},n{(i * k + 2) % 40}" for i in range(40) for k in (1, 7)]
    (folder / "friends" / "edges.csv").write_text("source,target\n" + "\n".join(pairs) + "\n")


def many_graphs(folder: Path) -> None:
    """Triangles and paths of three nodes."""
    path = torch.tensor([[0, 1], [1, 2]])
    triangle = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [
        {"edge_index": (path, triangle)[i % 2], "x": torch.ones(3, 2), "y": torch.tensor([i % 2])} for i in range(40)
    ]
    torch.save(graphs, folder / "shapes.pt")


def module(folder: Path) -> None:
    shutil.copy(MINE, folder)


def weights(folder: Path) -> None:
    """What another run has exported, and text to go on with."""
    text(folder)
    first, _ = hour(folder, ("corpus",), ("model.depth=1", "model.width=16", "model.heads=2", *TEXT, "name=first"))
    done = forked(folder, "export", str(first), "--to", "hf", "--out", "small")
    assert done.returncode == 0, done.stderr
    (folder / "recipe.toml").unlink()


SMALL = ("model.depth=1", "model.width=16", "model.heads=2", *TEXT)
STORIES = {
    "text": Story(text, ("corpus",), SMALL, ("evaluate", "report", "sample", "export")),
    "lines": Story(lines, ("sums.jsonl",), SMALL),
    "weights": Story(weights, ("small", "corpus"), TEXT),
    "nodes": Story(graph, ("friends",), ("model.width=8",)),
    "links": Story(graph, ("friends",), ("model.width=8", "graph.task=link")),
    "graphs": Story(many_graphs, ("shapes.pt",), ("model.width=8", "graph.task=graph")),
    "generated graph": Story(lambda _: None, ("planted:nodes=200,degree=4,features=4,classes=3",), ("model.width=8",)),
    "module": Story(module, ("mine.py",), ("model.arguments={classes=10}",)),
}


def printed(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """The commands that a program has printed, word by word."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [shlex.split(found) for found in COMMAND.findall(done.stdout)]


def hour(folder: Path, paths: tuple[str, ...], options: tuple[str, ...]) -> tuple[Path, str]:
    """The run that printed commands make of what lies at `paths`, and what was printed after training."""
    (folder / "machine.toml").write_text(MACHINE)
    commands = printed(forked(folder, "init", *paths))
    assert [words[0] for words in commands] == ["plan", "train"]
    more = (*SHORT, *options, "plan.cluster=machine.toml")
    assert forked(folder, *commands[0], *more).returncode == 0
    done = forked(folder, *commands[1], *more)
    for words in printed(done):
        again = forked(folder, *words)
        assert again.returncode == 0, f"{words}: {again.stdout}{again.stderr}"
        assert again.stdout.strip(), words
    (run,) = {Path(words[1]) for words in printed(done)}
    return run, done.stdout


NORMAL = ("weights", "nodes", "module")  # "weights" begins with text


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in NORMAL else pytest.mark.slow) for one in STORIES]
)
def test_printed_commands_lead_from_what_one_has_to_a_model_on_another_machine(name: str, tmp_path: Path) -> None:
    story, folder, there = STORIES[name], tmp_path / "here", tmp_path / "there"
    folder.mkdir()
    story.bring(folder)
    run, said = hour(folder, story.paths, story.options)
    assert all(word in said for word in story.words), said
    asked = [words for found in COMMAND.findall(said) if (words := shlex.split(found))[0] == "predict"]
    before = [forked(folder, *words, "--json").stdout for words in asked]

    there.mkdir()
    shutil.move(folder / run, there / "model")
    shutil.rmtree(folder)
    after = [forked(there, words[0], "model", *words[2:], "--json") for words in asked]
    assert [done.returncode for done in after] == [0] * len(asked), [done.stderr for done in after]
    assert [done.stdout for done in after] == before
    assert not espalier.open(there / "model").model(trust=True).training
