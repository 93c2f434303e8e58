"""A run folder is the model: copied elsewhere and without its data it predicts, exports and opens to the same bits."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import MACHINE, forked, launched
from safetensors.torch import load_file
from torch.distributed import HashStore

import espalier
from espalier.cli import eval as _eval  # noqa: F401
from espalier.cli import export, host_supervisor, open_run, predict, resolve_recipe, run_data, train  # noqa: F401
from espalier.cli import main as cli
from espalier.comm import multihost_probe
from espalier.comm.rendezvous_wait import Deadline
from espalier.graph import workload_row as _graphs  # noqa: F401 - loaded once, before programs are forked
from espalier.graph.data import kept_graph
from espalier.graph.data.graph import Graph
from espalier.graph.tasks.link_prediction import Links, LinkTask
from espalier.graph.workload import GraphWorkload, open_graph
from espalier.language import workload_row as _language  # noqa: F401
from espalier.language.tokenizer import kept_tokenizer
from espalier.module import workload as _modules  # noqa: F401
from espalier.recipe import data_hash, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import run_folder as runs
from espalier.train import workload_registry
from espalier.train.rank_spec import RankSpec

pytestmark = pytest.mark.timeout(400)  # the first test waits for a run of every workload

TEXT = "document {number}: the same words again and again, {number} times over. " * 60

NETWORK = """
import torch
from torch import nn

class Sum(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(features, 8), nn.Linear(8, classes)

    def forward(self, x, edge_index):
        x = self.first(x).relu()
        return self.second(x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))

def network(features, classes):
    return Sum(features, classes)
"""

LEARNED = "zebras and vixens. " * 900
"""Text whose hash keeps it in training: a tokenizer that is trained anew learns of it."""

THEIRS = """
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import layers

HERE = Path(__file__).parent


def numbers():
    values = [float(line) for line in (HERE / "lines.txt").read_text().split()]
    return TensorDataset(torch.tensor(values)[:, None])


def squares(model, batch):
    return model(batch[0]).square().sum(), torch.tensor(len(batch[0]))


def build():
    torch.manual_seed(0)
    return layers.stack(), numbers, squares, numbers
"""
LAYERS = (
    "from torch import nn\n\n\ndef stack():\n    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))\n"
)

LANGUAGE = """[model]\ndepth = 1\nwidth = 16\nheads = 2\n[data]\npath = "text"\nvalidation = 0.3\ntokenizer = "{}"\n"""
GRAPH = '[model]\nkind = "sage"\nwidth = 8\n[data]\npath = "graph"\n[graph]\ntask = "{}"\n'
RECIPES = {
    "bytes": LANGUAGE.format("bytes"),
    "bpe": LANGUAGE.format("bpe:300"),
    "node": GRAPH.format("node"),
    "link": GRAPH.format("link"),
    "inductive": GRAPH.format("node") + "inductive = true\nfanout = [3, 3]\n",
    "graphs": GRAPH.replace('"graph"', '"shapes.pt"').format("graph") + "pickle = true\n",
    "messages": GRAPH.replace('"sage"\nwidth = 8', '"messages"\nbuild = "networks:network"').format("node"),
    "module": '[model]\nbuild = "numbers_of:build"\n',
}
INPUTS = {"bytes": "the", "bpe": "the", "graphs": "0,1", "messages": "n3"}
INPUTS |= dict.fromkeys(("node", "link", "inductive"), "n3,n7")
REST = """
[train]
steps = 2
{sequence}validate_tokens = 64
[plan]
trial = false
cluster = "{machine}"
[plan.pin]
ranks = 1
"""


def graph(folder: Path, classes: tuple[str, ...] = ("cat", "dog", "fish"), columns: str = "size,age") -> None:
    """40 nodes with names, two features and a class; what is renamed in `classes` and `columns` is renamed in all."""
    folder.mkdir(exist_ok=True)
    rows = [f"n{i},{classes[i % 3]},{i % 3 + i / 100:.2f},{i % 5}" for i in range(40)]
    (folder / "nodes.csv").write_text(f"id,label,{columns}\n" + "\n".join(rows) + "\n")
    pairs = sorted({(i, (i * k + 3) % 40) for i in range(40) for k in (1, 7)})
    (folder / "edges.csv").write_text("source,target\n" + "\n".join(f"n{a},n{b}" for a, b in pairs) + "\n")


def shapes(file: Path) -> None:
    """A pickled list of triangles and paths, whose one feature is 1."""
    kinds = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [SimpleNamespace(edge_index=kinds[i % 2], x=torch.ones(3, 1), y=torch.tensor([i % 2])) for i in range(40)]
    torch.save(graphs, file)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a run of every workload in `runs`."""
    home = tmp_path_factory.mktemp("home")
    (home / "text").mkdir()
    for number in range(12):
        (home / "text" / f"{number}.txt").write_text(TEXT.format(number=number))
    graph(home / "graph")
    shapes(home / "shapes.pt")
    (home / "numbers_of.py").write_text(THEIRS)
    (home / "layers.py").write_text(LAYERS)
    (home / "networks.py").write_text(NETWORK)
    (home / "lines.txt").write_text("\n".join(str(i) for i in range(40)))
    (home / "machine.toml").write_text(MACHINE)
    for name, text in RECIPES.items():
        sequence = "sequence = 16\nbatch_tokens = 64\n" if name in ("bytes", "bpe") else ""
        (home / f"{name}.toml").write_text(text + REST.format(sequence=sequence, machine=home / "machine.toml"))
        done = forked(home, "train", f"{name}.toml")
        assert done.returncode == 0, done.stderr
    return home


def moved(home: Path, name: str, to: Path) -> Path:
    """A copy of the run in a folder without its data, with another cache: the working directory of what follows."""
    to.mkdir(parents=True, exist_ok=True)
    shutil.copytree(home / "runs" / name, to / "run")
    cache = to / "cache" / "espalier"
    cache.mkdir(parents=True)
    if (home / "cache" / "espalier" / "key").exists():  # the same user
        shutil.copy(home / "cache" / "espalier" / "key", cache)
    return to


@pytest.fixture
def without_data(home: Path) -> Any:
    """The data and the code are gone while the test runs."""
    names = ["text", "graph", "shapes.pt", "lines.txt", "numbers_of.py", "layers.py", "networks.py"]
    away = home / "away"
    away.mkdir()
    for name in names:
        (home / name).rename(away / name)
    yield
    for name in names:
        (away / name).rename(home / name)
    away.rmdir()


def said(folder: Path, *words: str) -> Any:
    done = forked(folder, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(folder: Path, *words: str) -> str:
    done = forked(folder, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def exported(folder: Path, run: str, form: str) -> dict[str, bytes]:
    said(folder, "export", run, "--to", form, "--out", str(folder / f"out-{form}"), "--json")
    files = sorted((folder / f"out-{form}").rglob("*"))
    return {str(one.relative_to(folder / f"out-{form}")): one.read_bytes() for one in files if one.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in ("bpe", "node", "module") else pytest.mark.slow) for one in RECIPES]
)
def test_a_copied_run_without_its_data_gives_the_same_bits(
    home: Path, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ask = ["--json", *(["--tokens", "8"] if name in ("bytes", "bpe") else [])]
    text = INPUTS.get(name)
    before = said(home, "predict", f"runs/{name}", text, *ask) if text else None
    evaluated = said(home, "eval", f"runs/{name}", "--json") if text else None
    forms = ["hf", "safetensors"] if name in ("bytes", "bpe") else ["safetensors"]
    files = {form: exported(home, f"runs/{name}", form) for form in forms}
    for form in forms:
        shutil.rmtree(home / f"out-{form}")

    request.getfixturevalue("without_data")
    there = moved(home, name, tmp_path / "elsewhere")
    if text:
        assert said(there, "predict", "run", text, *ask) == before
        assert said(there, "eval", "run", "--json") == {**evaluated, "run": "run"}
    for form in forms:
        assert exported(there, "run", form) == files[form]
    model = espalier.open(there / "run").model(trust=True)
    weights = load_file(there / "out-safetensors" / "model.safetensors")
    assert not model.training
    assert all(torch.equal(one, model.state_dict()[key]) for key, one in weights.items())
    assert len(weights) == len(model.state_dict())


@pytest.mark.parametrize(
    ("name", "lines"), [pytest.param("bytes", ["the", "é"], marks=pytest.mark.slow), ("node", ["n3", "n7,n9"])]
)
def test_lines_of_standard_input_are_answered_as_each_alone(home: Path, name: str, lines: list[str]) -> None:
    ask = ["--tokens", "8"] if name == "bytes" else []
    alone = [said(home, "predict", f"runs/{name}", line, "--json", *ask) for line in lines]

    def answered(text: str, *words: str) -> tuple[int, list[str], str]:
        done = forked(home, "predict", f"runs/{name}", "-", *ask, *words, typed=text)
        return done.returncode, done.stdout.splitlines(), done.stderr

    code, found, _ = answered("\n\n".join(lines), "--json")
    assert code == 0
    assert [json.loads(line) for line in found] == alone
    if name == "node":  # a line that has no answer does not stop the others
        code, found, _ = answered("n3\nnobody\nn7,n9\n", "--json")
        assert code == 2
        read = [json.loads(line) for line in found]
        assert [read[0], read[2]] == alone
        assert read[1]["input"] == "nobody"
        assert "nobody" in read[1]["error"]
        code, found, complaint = answered("nobody\nn3\n")
        assert (code, len(found)) == (2, 1)
        assert "nobody" in complaint


def test_a_module_is_evaluated_where_its_data_is_and_keeps_the_code_of_its_weights(
    home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert said(home, "eval", "runs/module", "--json")["loss"] > 0
    layers = (home / "layers.py").read_text()
    try:
        (home / "layers.py").write_text(layers.replace("Tanh", "ReLU"))
        export = ("export", "runs/module", "--out", "exported", "--json")
        said(home, *export)
        assert "Tanh" in (home / "exported" / "code" / "layers.py").read_text()
        assert "Tanh" in repr(espalier.open(home / "runs" / "module").model(trust=True))
    finally:
        (home / "layers.py").write_text(layers)
    request.getfixturevalue("without_data")
    assert "lines.txt" in refused(moved(home, "module", tmp_path / "elsewhere"), "eval", "run", "--data", "lines.txt")


# --- changed data ----------------------------------------------------------------------------------------------------


def test_a_file_more_in_the_corpus_changes_no_prediction_and_no_evaluation(home: Path) -> None:
    shutil.copytree(home / "runs" / "bpe", home / "runs" / "more")
    evaluated = said(home, "eval", "runs/more", "--json")
    asked = ("predict", "runs/more", "the same", "--tokens", "8", "--json")
    before, tokenizer = said(home, *asked), home / "runs" / "more" / "preprocessing" / "tokenizer.json"
    table = tokenizer.read_bytes()
    extra, learned = home / "text" / "extra.txt", home / "text" / "learned.txt"
    extra.write_text("zebra quartz jukebox vixen. " * 900)  # is held out
    learned.write_text(LEARNED)
    try:
        assert said(home, "eval", "runs/more", "--json") == evaluated
        assert said(home, *asked) == before
        resume = ("train", "bpe.toml", "--run", "runs/more", "train.steps=3")
        assert "text/extra.txt is new (and 1 more) since" in refused(home, *resume)
        assert said(home, "eval", "runs/more", "--data", "text", "--json")["loss"] != evaluated["loss"]
        accepted = forked(home, *resume, "faults.changed_data=accept")
        assert accepted.returncode == 0, accepted.stderr
        assert tokenizer.read_bytes() == table
    finally:
        extra.unlink()
        learned.unlink()
        shutil.rmtree(home / "runs" / "more")


def test_hosts_without_the_run_folder_are_given_what_the_run_keeps(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `faults.changed_data=accept` each host would train a tokenizer of its own on other text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    recipe = recipe_file.load(home / "bpe.toml", [f"data.path={home}/text", "faults.changed_data=accept"])
    asked = {"recipe": recipe_file.to_table(recipe), "origin": "bpe.toml", "beside": str(home), "trust": False}
    asked |= {"run": str(home / "runs" / "bpe"), "quiet": True, "kept": run_data.packed(home / "runs" / "bpe")}
    assert not run_data.packed(tmp_path)
    extra = home / "text" / "extra.txt"
    extra.write_text(LEARNED)
    try:
        first = host_supervisor.opened(RankSpec(world=2), asked).workload
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        elsewhere = {**asked, "run": str(tmp_path / "run")}
        second = host_supervisor.opened(RankSpec(1, 2), elsewhere).workload
        alone = host_supervisor.opened(RankSpec(1, 2), {**elsewhere, "kept": ""}).workload
    finally:
        extra.unlink()
    assert first.tokenizer.encode(b"the same").tolist() == kept_ids(home, "bpe", b"the same")
    assert first.fingerprint() == second.fingerprint() != alone.fingerprint()


def test_ranks_that_torchrun_started_on_another_host_go_on_with_what_the_run_keeps(home: Path, tmp_path: Path) -> None:
    """The second host has the recipe and the text, and a cache of its own; the run's folder is on the first alone."""
    there = tmp_path / "there"
    shutil.copytree(home / "text", there / "text")
    (home / "two.toml").write_text(2 * MACHINE.replace("cores = 2", "cores = 1") + '[links]\nbetween = "1Gbit/s"\n')
    for folder in (home, there):
        text = (home / "bpe.toml").read_text().replace("machine.toml", "two.toml").replace("ranks = 1", "ranks = 2")
        (folder / "apart.toml").write_text(text)

    def ran(*words: str) -> None:
        def run() -> int:
            rank = os.environ["RANK"]
            multihost_probe.host = lambda: f"host{rank}"
            if rank == "1":
                os.chdir(there)
                os.environ["XDG_CACHE_HOME"] = str(there / "cache")
            target = f"checkpoint.target={home / 'saved'}"  # torchrun's ranks save on a file system that all see
            return cli.main(["train", "apart.toml", "faults.changed_data=accept", target, *words])

        for done in launched(home, run):
            assert done.returncode == 0, done.stdout + done.stderr

    ran()
    kept = home / "runs" / "apart" / "preprocessing" / "tokenizer.json"
    table, extra = kept.read_bytes(), [folder / "text" / "extra.txt" for folder in (home, there)]
    for one in extra:
        one.write_text(LEARNED)
    try:
        ran("train.steps=4")
    finally:
        extra[0].unlink()
    assert kept.read_bytes() == table
    assert not (there / "runs").exists()
    (sent,) = (there / "cache" / "espalier" / "runs").iterdir()
    assert (sent / "preprocessing" / "tokenizer.json").read_bytes() == table


@pytest.mark.parametrize("name", ["bpe", "node"])
def test_what_a_run_keeps_reaches_ranks_on_other_hosts_through_the_store(
    home: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run_data, "_PIECE", 1000)
    store, run = HashStore(), home / "runs" / name
    assert run_data.shared(store, "kept", run, Deadline(20.0, "Rank 1")) == run / "preprocessing"
    there = run_data.shared(store, "kept", None, Deadline(20.0, "Rank 1"))
    assert there is not None
    assert there.is_relative_to(tmp_path)
    assert data_hash.in_folder(there) == data_hash.in_folder(run / "preprocessing")
    (there / "hashes.json").write_text("{}")  # somebody has changed it
    with pytest.raises(UserError, match="since it was written"):
        run_data.shared(store, "kept", None, Deadline(20.0, "Rank 1"))
    run_data.shared(store, "none", tmp_path / "new", Deadline(20.0, "Rank 1"))
    assert run_data.shared(store, "none", None, Deadline(20.0, "Rank 1")) is None


def kept(home: Path, name: str) -> kept_graph.KeptGraph:
    found = runs.find(home / "runs" / name).kept()
    assert found is not None
    return kept_graph.read(found)


def reopened(home: Path, name: str, folder: Path) -> GraphWorkload:
    recipe = open_run._with_data(runs.find(home / "runs" / name).read(), str(folder))
    return open_graph(recipe, run_graph=kept(home, name))


RENAMED = [
    ({"classes": ("cat", "dog", "bird")}, r"has the class 'bird'.*there: bird, cat, dog; in the run: cat, dog, fish"),
    ({"columns": "size,years"}, r"has the feature 'years'.*there: size, years; in the run: size, age"),
    ({"columns": "size"}, r"has no feature 'age'"),
]


@pytest.mark.parametrize(("change", "says"), RENAMED, ids=["class", "column", "column removed"])
def test_what_is_renamed_in_a_graph_is_refused_by_name(
    home: Path, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    graph(tmp_path / "graph", **change)
    if change.get("columns") == "size":
        lines = (tmp_path / "graph" / "nodes.csv").read_text().splitlines()
        (tmp_path / "graph" / "nodes.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines[1:]) + "\n")
        text = (tmp_path / "graph" / "nodes.csv").read_text()
        (tmp_path / "graph" / "nodes.csv").write_text("id,label,size\n" + text)
    with pytest.raises(UserError, match=re.compile(says, re.DOTALL)):
        reopened(home, "node", tmp_path / "graph")


@pytest.mark.parametrize(
    ("change", "says"),
    [({"y": torch.tensor([2])}, "has the class '2'.*in the run: 0, 1"), ({"x": torch.ones(3, 2)}, "has 2 features")],
    ids=["class", "column"],
)
def test_what_is_changed_in_a_list_of_graphs_is_refused_by_name(
    home: Path, change: dict[str, torch.Tensor], says: str, tmp_path: Path
) -> None:
    graphs = torch.load(home / "shapes.pt", weights_only=False)
    for one in graphs if "x" in change else graphs[-1:]:
        vars(one).update(change)
    torch.save(graphs, tmp_path / "shapes.pt")
    with pytest.raises(UserError, match=re.compile(says, re.DOTALL)):
        reopened(home, "graphs", tmp_path / "shapes.pt")


def test_classes_columns_and_nodes_in_another_order_are_mapped_by_name(home: Path, tmp_path: Path) -> None:
    graph(tmp_path / "graph")
    rows = [line.split(",") for line in (tmp_path / "graph" / "nodes.csv").read_text().splitlines()]
    lines = [",".join((one[0], one[1], one[3], one[2])) for one in [rows[0], *reversed(rows[1:])] if one[1] != "cat"]
    (tmp_path / "graph" / "nodes.csv").write_text("\n".join(lines) + "\n")
    edges = (tmp_path / "graph" / "edges.csv").read_text().splitlines()
    there = {line.partition(",")[0] for line in lines}
    links = [line for line in edges[1:] if set(line.split(",")) <= there]
    (tmp_path / "graph" / "edges.csv").write_text("\n".join([edges[0], *links]) + "\n")
    before, now = kept(home, "node").graph, reopened(home, "node", tmp_path / "graph").graph
    assert now.classes == before.classes == ("cat", "dog", "fish")
    assert now.columns == ("size", "age")
    names = list(before.names)
    assert before.labels is not None
    assert now.labels is not None
    for at, name in enumerate(now.names):
        assert before.labels[names.index(name)] == now.labels[at]
        assert (before.features[names.index(name)] == now.features[at]).all()


def parts(graph: Graph) -> dict[str, str]:
    assert graph.parts is not None
    return {graph.called(int(one)): part for part, ids in graph.parts.named() for one in ids}


def test_nodes_and_links_keep_their_part_when_others_come(home: Path, tmp_path: Path) -> None:
    graph(tmp_path / "graph")
    with (tmp_path / "graph" / "nodes.csv").open("a") as file:
        file.write("".join(f"new{i},dog,1,1\n" for i in range(20)))
    with (tmp_path / "graph" / "edges.csv").open("a") as file:
        file.write("".join(f"new{i},n{i}\n" for i in range(20)))
    before, now = (parts(one) for one in (kept(home, "node").graph, reopened(home, "node", tmp_path / "graph").graph))
    assert before.items() <= now.items()
    assert {now[f"new{i}"] for i in range(20)} == {"train", "validation", "test"}

    def links(graph: Graph, of: Links) -> dict[frozenset[str], str]:
        ends = [frozenset(graph.called(int(one)) for one in pair) for pair in of.pairs.T]
        return {ends[at]: part for part, ids in of.parts.named() for at in ids}

    old, task = kept(home, "link"), reopened(home, "link", tmp_path / "graph").task
    assert isinstance(task, LinkTask)
    assert old.links is not None
    assert links(old.graph, old.links).items() <= links(task.graph, task.links).items()


# --- what a folder keeps ---------------------------------------------------------------------------------------------


def test_what_is_kept_and_was_changed_is_refused_by_name(home: Path, tmp_path: Path) -> None:
    there = moved(home, "bpe", tmp_path)
    (there / "run" / "preprocessing" / "tokenizer.json").write_text("{}")
    assert "preprocessing/tokenizer.json has changed since" in refused(there, "predict", "run", "the")


def test_code_in_a_run_of_another_user_does_not_run(home: Path, tmp_path: Path) -> None:
    there = moved(home, "module", tmp_path)
    code = there / "run" / "preprocessing" / "code" / "layers.py"
    code.write_text(code.read_text() + "\nraise SystemExit('this ran')\n")
    hashes = there / "run" / "preprocessing" / "hashes.json"
    hashes.write_text(json.dumps({k: v for k, v in data_hash.in_folder(hashes.parent).items() if k != "hashes.json"}))
    assert "was not begun by you" in refused(there, "export", "run")


def test_a_run_trained_on_a_pickle_needs_neither_it_nor_trust(home: Path, tmp_path: Path) -> None:
    there = moved(home, "graphs", tmp_path)
    shutil.rmtree(there / "cache")  # another user's machine
    asked = ("predict", "run", "0,1", "--json")
    assert said(there, *asked) == said(home, "predict", "runs/graphs", "0,1", "--json")
    assert not espalier.open(there / "run").model().training
    said(there, "export", "run", "--json")
    assert "graph.pickle = True" in refused(there, "eval", "run", "--data", str(home / "shapes.pt"))
    assert said(there, "eval", "run", "--data", str(home / "shapes.pt"), "--trust", "--json")["loss"] > 0


@pytest.fixture(scope="module")
def large(home: Path) -> Path:
    """A run of a graph that is too large to be kept whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_graph, "LIMIT", 100)
        done = forked(home, "train", "node.toml", "--run", "runs/large", "train.steps=3")
        assert done.returncode == 0, done.stderr
        done = forked(home, "train", "graphs.toml", "--run", "runs/large-graphs", "train.steps=3")
        assert done.returncode == 0, done.stderr
    return home / "runs" / "large"


@pytest.mark.slow
def test_of_a_large_graph_the_model_needs_no_data_and_predictions_take_it_from_anywhere(
    home: Path, large: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked = ("predict", "run", "n3,n7", "--json")
    before, evaluated = said(home, *(str(large) if one == "run" else one for one in asked)), {}
    for name in ("large", "large-graphs"):
        moved(home, name, tmp_path / name)
        evaluated[name] = said(home, "eval", f"runs/{name}", "--json")
    state = espalier.open(large).model().state_dict()
    shutil.copytree(home / "graph", tmp_path / "graph")
    request.getfixturevalue("without_data")
    for name in ("large", "large-graphs"):
        assert exported(tmp_path / name, "run", "safetensors").keys() > {"model.safetensors", "graph.json"}
    model = espalier.open(tmp_path / "large" / "run").model()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for words in (asked[:-1], ("eval", "run"), ("export", "run", "--to", "embeddings")):
        message = refused(tmp_path / "large", *words)
        assert "graph' does not exist" in message
        assert "try: --data PATH" in message
    there = ("--data", str(tmp_path / "graph"))
    assert said(tmp_path / "large", *asked, *there) == before
    assert said(tmp_path / "large", "eval", "run", "--json", *there) == {**evaluated["large"], "run": "run"}


def test_checkpoints_that_were_elsewhere_are_copied_into_the_folder(home: Path, tmp_path: Path) -> None:
    there = moved(home, "bytes", tmp_path)
    recipe = there / "run" / "run.toml"
    recipe.write_text(recipe.read_text().replace("[checkpoint]\n", '[checkpoint]\ntarget = "/nowhere/saved"\n'))
    asked = ("predict", "run", "the", "--tokens", "8")
    assert said(there, *asked, "--json") == said(home, "predict", "runs/bytes", *asked[2:], "--json")
    (there / "run" / "checkpoints").rename(there / "gone")
    message = refused(there, *asked)
    assert "looked in /nowhere/saved" in message
    assert "copy it to run/checkpoints" in message


def test_text_is_predicted_without_data(home: Path) -> None:
    assert "--data is for runs on graphs" in refused(home, "predict", "runs/bytes", "the", "--data", "text")


def test_a_run_without_preprocessing_reads_its_data_and_refuses_what_changed(home: Path, tmp_path: Path) -> None:
    there = moved(home, "bpe", tmp_path)
    shutil.rmtree(there / "run" / "preprocessing")
    asked = ("predict", "run", "the same", "--tokens", "8", "--json")
    assert said(there, *asked) == said(
        home, *(one.replace("run", "runs/bpe") if one == "run" else one for one in asked)
    )
    table = json.loads((there / "run" / "data.json").read_text())
    hashes = {**table["hashes"], next(iter(table["hashes"])): "0" * 32}
    (there / "run" / "data.json").write_text(json.dumps({**table, "hashes": hashes}))
    assert "has changed since run was begun" in refused(there, "predict", "run", "the")


# --- weights to start from -------------------------------------------------------------------------------------------


def settled(home: Path, tokenizer: str) -> Any:
    lines = f'[model]\ninitial = "{home}/weights"\n[data]\npath = "{home}/text"\nvalidation = 0.3\n{tokenizer}\n'
    (home / "initial.toml").write_text(lines + "[train]\nsteps = 2\nsequence = 16\nbatch_tokens = 64\n")
    return resolve_recipe.resolve(home / "initial.toml", [])


def test_the_tokenizer_of_the_weights_is_the_default_and_another_one_is_refused(home: Path) -> None:
    for name, expected in (("bpe", str(home / "weights" / "tokenizer.json")), ("bytes", "bytes")):
        said(home, "export", f"runs/{name}", "--to", "hf", "--out", str(home / "weights"), "--json")
        found = settled(home, "")
        assert found.recipe.data[0].tokenizer == expected
        assert [one.value for one in found.derivations if one.key == "data.tokenizer"] == [expected]
        opened = workload_registry.open_workload(found)
        assert opened.tokenizer.vocabulary == found.recipe.model.vocabulary
        assert opened.tokenizer.encode(b"the same").tolist() == kept_ids(home, name, b"the same")
    said(home, "export", "runs/bpe", "--to", "hf", "--out", str(home / "weights"), "--json")
    for given, has in (("bytes", r"256 tokens"), ("bpe:400", "trained on this corpus")):
        with pytest.raises(UserError, match=rf"data.tokenizer = '{given}' \({has}\) is not the tokenizer .* tokens\)"):
            settled(home, f'tokenizer = "{given}"')
    (home / "weights" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        settled(home, "")
    shutil.rmtree(home / "weights")


def kept_ids(home: Path, name: str, text: bytes) -> list[int]:
    folder = runs.find(home / "runs" / name)
    kept = folder.kept()
    assert kept is not None
    return [int(one) for one in kept_tokenizer(folder.read().data[0].tokenizer, kept).encode(text)]
