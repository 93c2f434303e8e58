"""`espalier eval` and `predict` of a graph in parts: any number of ranks says what one says, each from its own part."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from tests.story.programs import MACHINE, forked, launched

from espalier.cli import main as cli
from espalier.cli.open_run import DataChoice, SavedRun
from espalier.graph.networks import gnn_adapter
from espalier.graph.parts import partition_folder
from espalier.graph.parts.graph_cut import Cutting
from espalier.graph.workload import open_graph
from espalier.plan import base as plans
from espalier.recipe.errors import UserError
from espalier.train import run_folder as runs

NODES = 90
SAGE = ["model.kind=sage", "model.depth=2", "model.width=8", "model.dropout=0.2"]
TOKENS = ["model.kind=graph-transformer", "model.depth=2", "model.width=16", "model.heads=4"]
COMMON = [f"data.path=planted:nodes={NODES},degree=5,features=6,classes=3", "train.steps=3", "train.validate_every=3"]
PLAN = ["plan.cluster=machine.toml", "plan.trial=false", "plan.pin.threads=1"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "machine.toml").write_text(MACHINE)
    (folder / "recipe.toml").write_text("[model]\nkind = 'sage'\n[data]\npath = 'planted'\n[graph.halo]\nbits = 32\n")
    for name, model in (("sage", SAGE), ("tokens", TOKENS)):
        more = (*COMMON, *PLAN, "plan.pin.ranks=2", f"name={name}", "--run", f"runs/{name}")
        done = forked(folder, "train", "recipe.toml", *model, *more)
        assert done.returncode == 0, done.stderr
    return folder


def over(home: Path, name: str, count: int) -> None:
    """The run `name` as if `count` ranks had trained it."""
    run = runs.RunFolder(home / "runs" / name)
    plan = plans.read(run.plan)
    ranks = tuple(plans.Rank(share=(at, at + 1)) for at in range(count))
    run.plan.write_text(plans.dumps(msgspec.structs.replace(plan, ranks=ranks, stages=(), units=(plans.Unit(),))))


def told(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["answers"]) == len(expected["answers"]) == NODES
    for one, other in zip(found["answers"], expected["answers"], strict=True):
        assert one["label"] == other["label"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["sage", "tokens"])
def test_any_number_of_ranks_evaluates_and_predicts_as_one(home: Path, name: str) -> None:
    over(home, name, 1)
    answers, figures = (told(forked(home, verb, f"runs/{name}", "--json")) for verb in ("predict", "eval"))
    (last,) = (
        event
        for event in map(json.loads, (home / "runs" / name / "events.jsonl").read_text().splitlines())
        if event["event"] == "validation"
    )
    assert figures["loss"] == pytest.approx(last["loss"], rel=1e-5)  # two ranks had validated
    for count in (2, 3, 4):
        over(home, name, count)
        same(told(forked(home, "predict", f"runs/{name}", "--json")), answers)
    found = told(forked(home, "eval", f"runs/{name}", "--json"))
    assert found.pop("run") == figures.pop("run")
    assert found == pytest.approx(figures, rel=1e-5)


def test_ranks_of_a_launcher_evaluate_together_and_the_first_answers(home: Path) -> None:
    over(home, "sage", 1)
    answers = told(forked(home, "predict", "runs/sage", "--json"))
    over(home, "sage", 2)
    first, second, third = launched(home, partial(cli.main, ["predict", "runs/sage", "--json"]), ranks=3)
    same(told(first), answers)
    assert (second.returncode, third.returncode) == (0, 0), second.stderr
    assert second.stdout == third.stdout == ""


@pytest.fixture(scope="module")
def parts(home: Path) -> Path:
    """A run on a graph that was cut into three parts before."""
    recipe = runs.RunFolder(home / "runs" / "sage").read()
    workload = open_graph(recipe)
    view = workload.whole_task.train
    cutting = Cutting(view.graph, view.style, gnn_adapter.takes_sums(workload.bare()))
    cut = cutting.boundary(cutting.parts([1] * 3), 3)
    partition_folder.write(home / "parts", view.graph, view.style, *cut)
    more = ("data.path=parts", "train.steps=3", "train.validate_every=3", *PLAN, "plan.pin.ranks=3", "name=parts")
    done = forked(home, "train", "recipe.toml", *SAGE, *more, "--run", "runs/parts")
    assert done.returncode == 0, done.stderr
    return home / "parts"


def test_each_rank_reads_its_own_part_and_a_part_that_is_elsewhere_is_named(
    home: Path, parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, load = home / "log", partition_folder.load_file

    def noted(path: Path) -> Any:
        if path.name.startswith("part-"):
            with log.open("a") as file:
                file.write(f"{path.name}\n")
        return load(path)

    monkeypatch.setattr(partition_folder, "load_file", noted)
    answers = told(forked(home, "predict", "runs/parts", "--json"))
    assert sorted(log.read_text().split()) == [f"part-{rank}.safetensors" for rank in range(3)]
    monkeypatch.chdir(home)
    alone = SavedRun.find("runs/parts", data=DataChoice(predicts=True)).trained()
    same(answers, {"answers": cast("Any", alone.workload).task.answers(alone.model, range(NODES))})
    (parts / "part-1.safetensors").rename(parts / "away")
    done = forked(home, "eval", "runs/parts")
    assert done.returncode == 2
    assert "part-1.safetensors cannot be read" in done.stderr
    assert "start a rank where it is (torchrun, srun, mpiexec)" in done.stderr
    (parts / "away").rename(parts / "part-1.safetensors")
    whole = (parts / partition_folder.NODES).read_bytes()
    (parts / partition_folder.NODES).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=r"(?s)is damaged.*its checksum does not match.*--data PATH.*copy it anew"):
        SavedRun.find("runs/parts", data=DataChoice(predicts=True)).trained()
    (parts / partition_folder.NODES).write_bytes(whole)


def test_few_bits_on_parts_predict_alone_over_ranks_and_from_what_was_packed(home: Path) -> None:
    recipe = runs.RunFolder(home / "runs" / "sage").read()
    view = open_graph(recipe).whole_task.train
    cutting = Cutting(view.graph, view.style)
    partition_folder.write(home / "plain", view.graph, view.style, *cutting.boundary(cutting.parts([1, 1]), 2))
    quant = ("quant.kind=a2q", "data.path=plain", "train.steps=3", *PLAN, "plan.pin.ranks=2", "name=few")
    done = forked(home, "train", "recipe.toml", *SAGE, *quant, "--run", "runs/few")
    assert done.returncode == 0, done.stderr
    assert "packages, everything counted" in (home / "runs" / "few" / "report.html").read_text()
    answers = told(forked(home, "predict", "runs/few", "--json"))
    done = forked(home, "export", "runs/few", "--to", "packed")
    assert done.returncode == 0, done.stderr
    same(told(forked(home, "predict", "runs/few/export-packed", "--json")), answers)
    counted = told(forked(home, "explain", "runs/few", "--energy", "--json"))
    assert all(one["joules"] > 0 for one in counted["parts"] if "aggregation" in one["part"])
    model = SavedRun.find(home / "runs" / "few").trained().model
    assert len(list(model.named_parameters())) > 0


def test_answers_from_parts_of_a_reordered_graph_are_for_the_numbers_of_its_data(home: Path) -> None:
    options = ("model.dropout=0", "graph.order=rcmpp", "plan.pin.ranks=2")
    more = ("recipe.toml", *SAGE, *COMMON[1:], *PLAN, *options)
    done = forked(home, "plan", *more, COMMON[0], "--parts", "ordered")
    assert done.returncode == 0, done.stderr
    found = []
    for name, path in (("whole", COMMON[0]), ("cut", "data.path=ordered")):
        done = forked(home, "train", *more, path, "--run", f"runs/{name}", f"name={name}")
        assert done.returncode == 0, done.stderr
        found.append(told(forked(home, "predict", f"runs/{name}", f"31,0,{NODES - 1}", "--json"))["answers"])
    assert [one["name"] for one in found[1]] == ["node 31", "node 0", f"node {NODES - 1}"]
    for one, other in zip(*found, strict=True):
        assert (one["name"], one["label"]) == (other["name"], other["label"])
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


def test_a_run_with_parts_of_its_own_graph_answers_for_another(home: Path) -> None:
    np.save(home / "halves.npy", np.arange(NODES) % 2)
    more = (*SAGE, *COMMON, *PLAN, "plan.pin.ranks=2", "graph.halo.parts=halves.npy", "name=given")
    done = forked(home, "train", "recipe.toml", *more, "--run", "runs/given")
    assert done.returncode == 0, done.stderr
    other = ("--data", COMMON[0].removeprefix("data.path=").replace(str(NODES), "70"), "--json")
    assert len(told(forked(home, "predict", "runs/given", *other))["answers"]) == 70
    assert told(forked(home, "eval", "runs/given", *other))["loss"] > 0
