"""The table of kinds of model: a recipe's row says how it is opened, planned and asked; no other kind is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.story.programs import forked

from espalier import make_plan
from espalier.graph.data import import_graph
from espalier.language import token_store
from espalier.machine import cluster
from espalier.module.workload import ROW as MODULES
from espalier.parallel.workload import Shard, Workload
from espalier.recipe import Recipe, model_kinds
from espalier.recipe import recipe_file as recipes
from espalier.train import request_from_recipe, workload_registry
from espalier.train.workload_row import Opening, Profile, Row

MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n'

THEIRS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    def loss(model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).sum(), torch.tensor(len(batch[0]))
    return nn.Linear(8, 1), data, loss
"""


class BareRow(Row):
    """What every kind of model has, and no capability besides."""

    def open(self, recipe: Recipe, opening: Opening) -> Workload:
        return MODULES.open(recipe, opening)

    def profile(self, recipe: Recipe, opened: Callable[[], Workload]) -> Profile:
        return MODULES.profile(recipe, opened)

    def contents(self, recipe: Recipe, workload: Any) -> Mapping[str, str]:
        return MODULES.contents(recipe, workload)


ROW = BareRow()


def corpus(folder: Path) -> Path:
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"document {number}: " + "the same words again and again. " * 40)
    return text


def recipe_file(folder: Path, text: str) -> Path:
    file = folder / "recipe.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("tag", [tag for kind in model_kinds.KINDS for tag in kind.tags])
def test_every_kind_of_model_has_its_row(tag: str) -> None:
    build = {"build": "a:b"} if tag in ("module", "messages") else {}
    recipe = recipes.from_table({"model": {"kind": tag, **build}})
    assert model_kinds.of(recipe.model) is model_kinds.tagged(tag)
    assert isinstance(workload_registry.row(recipe), Row)


def test_a_language_run_imports_no_graphs(tmp_path: Path) -> None:
    file = recipe_file(
        tmp_path, f'[model]\ndepth = 1\n[data]\npath = "{corpus(tmp_path)}"\ncache = "{tmp_path}/cache"\n'
    )
    script = f"""
import sys
from espalier.cli import predict, resolve_recipe, train
from espalier.train import workload_registry
resolved = resolve_recipe.resolve({str(file)!r}, [])
resolve_recipe.request(resolved, workload=workload_registry.open_workload(resolved))
graphs = ("disk_batches", "few_bits", "halo_exchange", "pattern_attention")
rooms = ("espalier.graph", "espalier.sparse", "espalier.module")
rooms += tuple("espalier.mechanisms." + name for name in graphs)
found = [name for name in sys.modules if name.startswith(rooms)]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


def test_a_kind_with_only_what_every_kind_has_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model_kinds.tagged("module")
    assert module is not None
    monkeypatch.setattr(model_kinds, "KINDS", (replace(module, row=__name__), *model_kinds.KINDS))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[BareRow.__module__])
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "machine.toml").write_text(MACHINE)
    recipe_file(
        tmp_path,
        '[model]\nkind = "module"\nbuild = "theirs:build"\n[train]\nsteps = 3\nbatch_tokens = 16\n'
        '[plan]\ntrial = false\ncluster = "machine.toml"\npin.ranks = 2\n',
    )
    for verb in (("train", "recipe.toml"), ("train", "recipe.toml", "train.steps=5"), ("eval", "runs/recipe")):
        done = forked(tmp_path, *verb)
        assert done.returncode == (2 if verb[0] == "eval" else 0), done.stderr
        assert "Traceback" not in done.stderr
    refusals = {
        ("predict", "runs/recipe", "0"): "holds a module of your own",
        ("predict", "runs/recipe", "--turntable", "x.gif"): "is of no scene",
        ("predict", "runs/recipe", "--chat"): "does not answer in text",
        ("export", "runs/recipe", "--to", "hf"): "has no `hf` form",
        ("explain", "runs/recipe", "--energy"): "is not known",
        ("plan", "recipe.toml", "--parts", "parts"): "--parts is for graphs",
        ("eval", "runs/recipe", "--task", "facts=facts.jsonl"): "asks a language model",
    }
    for words, reason in refusals.items():
        refused = forked(tmp_path, *words)
        assert refused.returncode == 2
        assert reason in refused.stderr


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_corpus_is_opened_once(tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"path": str(corpus(tmp_path)), "cache": str(tmp_path / "cache"), "tokenizer": tokenizer}
    opened = []
    build_all = token_store.build_all

    def counted(*given, **named):  # type: ignore[no-untyped-def]
        opened.append(given)
        return build_all(*given, **named)

    monkeypatch.setattr(token_store, "build_all", counted)
    recipe = recipes.from_table({"model": {"depth": 1}, "data": [table]})
    resolved = workload_registry.settle(recipe, tmp_path)
    workload = workload_registry.open_workload(resolved)
    assert len(opened) == 1
    assert workload.global_batch == request_from_recipe.of_recipe(resolved.recipe).profile.global_batch


@pytest.mark.extremes
@pytest.mark.parametrize(
    "text",
    [
        '[model]\nkind = "module"\nbuild = "theirs:build"\n[train]\nbatch_tokens = 16\n',
        '[model]\nkind = "gcn"\n[data]\npath = "python:imports"\n',
        '[model]\ndepth = 1\n[data]\npath = "{text}"\ntokenizer = "bpe:300"\n',
    ],
    ids=["module", "graph", "language"],
)
def test_make_plan_answers_for_a_recipe_of_every_kind(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "python:imports" in text:  # a part of them
        modules = [one for one in import_graph.installed() if one.owner in ("python", "numpy")]
        monkeypatch.setattr(import_graph, "installed", lambda: modules)
    (tmp_path / "theirs.py").write_text(THEIRS)
    file = recipe_file(tmp_path, text.format(text=corpus(tmp_path)))
    plan = make_plan(file, cluster.loads(MACHINE))
    resolved = workload_registry.settle(recipes.load(file), tmp_path)
    workload = workload_registry.open_workload(resolved)
    layout = plan.layout
    assert layout is not None
    assert layout.dp * layout.micro_batch * layout.accumulate >= workload.global_batch


@pytest.mark.parametrize("kind", ["gpt", "moe"])
def test_the_pieces_of_a_decoder_are_its_forward(kind: str, tmp_path: Path) -> None:
    table = {"path": str(corpus(tmp_path)), "cache": str(tmp_path / "cache")}
    recipe = recipes.from_table({"model": {"kind": kind, "depth": 3, "width": 32, "heads": 2}, "data": [table]})
    workload = workload_registry.open_workload(workload_registry.settle(recipe, tmp_path))
    model = workload.build(torch.device("cpu"), torch.float32)
    pieces = workload.pieces(model)
    assert pieces is not None
    assert len(pieces.blocks) == 3
    (batch,) = workload.batches(0, Shard(0, 2, 2))
    assert torch.equal(pieces(batch.tokens, where=batch.where), model(batch.tokens, where=batch.where))
    gradients = [torch.autograd.grad(given.square().sum(), list(model.parameters())) for given in (
        pieces(batch.tokens, where=batch.where), model(batch.tokens, where=batch.where)
    )]  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    held = [{id(p) for module in own for p in module.parameters()} for own in pieces.modules]
    assert len(held) == 5
    assert set().union(*held) == {id(parameter) for parameter in model.parameters()}


def test_a_sequential_module_is_in_pieces_and_others_are_whole(tmp_path: Path) -> None:
    layers = "nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))"
    (tmp_path / "in_pieces.py").write_text(THEIRS.replace("nn.Linear(8, 1)", layers))
    file = recipe_file(tmp_path, '[model]\nkind = "module"\nbuild = "in_pieces:build"\n')
    workload = workload_registry.open_workload(workload_registry.settle(recipes.load(file), tmp_path))
    model = workload.build(torch.device("cpu"), torch.float32)
    pieces = workload.pieces(model)
    assert pieces is not None
    assert torch.equal(pieces(torch.ones(2, 8)), model(torch.ones(2, 8)))
    assert workload.pieces(model[0]) is None  # type: ignore[index]
