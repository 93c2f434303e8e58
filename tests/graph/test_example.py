"""The page on graphs: its recipe is the example's, and its code runs."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from doc_pages import PAGES
from programs import MACHINE, forked, scripted

from espalier.cli import main as cli
from espalier.graph.data import import_graph

ROOT = Path(__file__).parents[2]


def blocks(language: str, page: str = "graph") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[f"{page}.md"].read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("graph", "graph"), ("disk-batches", "graph-on-disk"), ("halo-exchange", "sylvie"),
        ("pattern-attention", "graph-transformer"), ("few-bits", "quantized-graph"),
    ],
)  # fmt: skip
def test_the_page_shows_the_example_as_it_is(page, example):
    assert blocks("toml", page)[0] == (ROOT / "examples" / f"{example}.toml").read_text(encoding="utf-8")


def test_the_page_shows_lines_of_the_loop_as_they_are():
    assert blocks("python", "disk-batches")[0] in (ROOT / "examples" / "disk_loop.py").read_text(encoding="utf-8")


def test_the_example_of_parts_trains_over_two_ranks_as_it_stands(tmp_path, monkeypatch):
    """On the modules of three distributions."""
    modules = [one for one in import_graph.installed() if one.owner in ("python", "numpy", "scipy")]
    monkeypatch.setattr(import_graph, "installed", lambda: modules)
    (tmp_path / "machine.toml").write_text(MACHINE)
    small = ["plan.cluster=machine.toml", "plan.trial=false", "train.steps=12", "train.validate_every=12"]
    found = forked(tmp_path, "train", str(ROOT / "examples" / "sylvie.toml"), *small, "--run", "run")
    assert found.returncode == 0, found.stderr
    assert "finished at step 12 of 12" in found.stdout
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert len(plan["ranks"]) == 2
    assert any("the graph is cut into 2 parts" in one and "1 bits" not in one for one in plan["why"])
    steps = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    sent = [one["bytes"]["halo"] for one in steps if one["event"] == "step"]
    assert sent[3] == pytest.approx(plan["predicted"]["sent_bytes"]["halo"])
    told = forked(tmp_path, "predict", "run", "0")
    assert told.returncode == 0, told.stderr


def test_a_run_on_parts_that_plan_wrote_is_one_on_the_graph(tmp_path):
    (tmp_path / "machine.toml").write_text(MACHINE)
    example, graph = str(ROOT / "examples" / "sylvie.toml"), "data.path=planted:nodes=600"
    how = ["plan.trial=false", "train.steps=4", "train.validate_every=2"]
    planned = forked(tmp_path, "plan", example, graph, "--cluster", "machine.toml", "--parts", "parts", "--json")
    assert planned.returncode == 0, planned.stderr
    assert len(json.loads(planned.stdout)["ranks"]) == 2
    assert "data.path=parts plan.pin.ranks=2" in planned.stderr
    names = {"manifest.json", "nodes.safetensors", "part-0.safetensors", "part-1.safetensors"}
    assert {one.name for one in (tmp_path / "parts").iterdir()} == names
    told = []
    for name, path in (("whole", graph), ("cut", "data.path=parts")):
        found = forked(tmp_path, "train", example, path, "plan.cluster=machine.toml", *how, "--run", name)
        assert found.returncode == 0, found.stderr
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        told.append([one["loss"] for one in events if one["event"] == "step"])
    assert told[0] == told[1]
    assert len(told[0]) == 4


@pytest.mark.parametrize(
    ("example", "more", "message"),
    [
        ("sylvie", ["plan.pin.ranks=1"], "plan.pin.ranks=2, or more"),
        ("sylvie", ["graph.inductive=true"], "trains on the whole graph"),
        ("graph", ["plan.pin.ranks=2"], "trains on the whole graph"),
        ("language", ["data.path=text.py"], "--parts is for graphs"),
    ],
)
def test_a_recipe_without_parts_has_none_written(tmp_path, monkeypatch, capsys, example, more, message):
    monkeypatch.chdir(tmp_path)
    Path("machine.toml").write_text(MACHINE)
    Path("text.py").write_text("".join(f"x{one} = {one}\n" for one in range(2000)))
    data = [] if example == "language" else ["data.path=planted:nodes=600"]
    asked = ["plan", str(ROOT / "examples" / f"{example}.toml"), *data, *more]
    assert cli.main([*asked, "--cluster", "machine.toml", "--parts", "parts"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("parts").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["sylvie", "graph-transformer"])
def test_an_example_trains_to_its_end_as_it_stands(tmp_path, name):
    """On the modules of this machine, which is not measured, with every default and trials of its plan."""
    (tmp_path / "machine.toml").write_text(MACHINE)
    path = ROOT / "examples" / f"{name}.toml"
    found = forked(tmp_path, "train", str(path), "plan.cluster=machine.toml", "--run", "run")
    assert found.returncode == 0, found.stderr
    steps = tomllib.loads(path.read_text(encoding="utf-8"))["train"]["steps"]
    assert f"finished at step {steps} of {steps}" in found.stdout
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in events if one["event"] == "step"]
    assert len(losses) == steps
    assert losses[-1] < 0.7 * losses[0]


def test_anybodys_loop_learns_from_features_on_disk(tmp_path):
    found = scripted(tmp_path, ROOT / "examples" / "disk_loop.py")
    assert found.returncode == 0, found.stderr
    losses = [float(line.rpartition(" ")[2]) for line in found.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.8 * losses[0]


def transformer(folder, node, *changes):
    """What a run of the example with `changes` prints, and what it then answers for `node`."""
    (folder / "machine.toml").write_text(MACHINE)
    options = (*changes, "plan.cluster=machine.toml", "plan.trial=false")
    found = forked(folder, "train", str(ROOT / "examples" / "graph-transformer.toml"), *options, "--run", "run")
    assert found.returncode == 0, found.stderr
    answer = forked(folder, "predict", "run", node)
    assert answer.returncode == 0, answer.stderr
    return found.stdout, answer.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_of_a_graph_transformer_trains_as_it_stands(tmp_path):
    """In fewer steps, on the modules of this machine. Answers attend over all pairs of them, which takes minutes."""
    said, answer = transformer(tmp_path, "json", "train.steps=3", "train.validate_every=3")
    assert "Attention: " in said
    assert "finished at step 3 of 3" in said
    assert answer.startswith("json\t")


def test_the_example_of_a_graph_transformer_trains_over_two_ranks(tmp_path):
    table = tomllib.loads((ROOT / "examples" / "graph-transformer.toml").read_text(encoding="utf-8"))
    assert table["model"]["kind"] == "graph-transformer"
    small = ["data.path=planted:nodes=300,degree=6,features=8,classes=3", f"data.cache={tmp_path}", "train.steps=10"]
    said, answer = transformer(tmp_path, "7", *small, "train.validate_every=5", "plan.pin.ranks=2")
    assert "Attention: one step in 5 is full, for no path through all tokens is known." in said
    assert "finished at step 10 of 10" in said
    assert answer.startswith("node 7\t")


@pytest.mark.slow
def test_the_example_on_disk_trains_with_features_ten_times_the_memory(tmp_path):
    (tmp_path / "machine.toml").write_text(MACHINE)
    example = str(ROOT / "examples" / "graph-on-disk.toml")
    small = ["data.path=planted:nodes=4000,degree=6,features=64,classes=4,train=0.05", "store.memory=0.095MiB"]
    small += [
        "train.steps=10",
        "train.batch_tokens=2",
        "train.validate_every=10",
        "plan.pin.ranks=1",
        "plan.pin.threads=1",
    ]
    small += [
        f"data.cache={tmp_path}",
        f"store.path={tmp_path / 'packed'}",
        "plan.cluster=machine.toml",
        "plan.trial=false",
    ]
    found = forked(tmp_path, "train", example, *small, "--run", "run")
    assert found.returncode == 0, found.stderr
    assert "finished at step 10 of 10" in found.stdout
    assert "features from" in found.stdout
    assert 4000 * 64 * 4 >= 10 * 0.095 * 2**20


def test_the_ten_lines_run(capsys):
    (code,) = (one for one in blocks("python") if "Sampler(" in one)
    exec(code, {})
    nodes, edges = capsys.readouterr().out.rsplit("[", 1)
    assert nodes.startswith("[ 0 50")
    assert edges.strip() == "12, 4]"
