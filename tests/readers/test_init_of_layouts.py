"""`espalier init` knows every layout of docs/data.md and says what it took a path for; its recipe can be run."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import inputs
import model_inputs
import pytest
import torch
from weight_folders import TEMPLATES, base_of

from espalier.cli import init
from espalier.cli import main as cli
from espalier.cli.resolve_recipe import resolve
from espalier.recipe.errors import UserError
from espalier.track.progress import waiting
from espalier.train import workload_registry

Written = Callable[[Path], Path]
"""Writes a layout below a folder; what `init` is given."""
MACHINE = '[[nodes]]\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n'
TEXTS = [{"text": f"Row {number} of a text, plain and long enough to be divided. " * 20} for number in range(40)]
ASKED = [{"role": "user", "content": "help me"}]
ANSWERS = [[*ASKED, {"role": "assistant", "content": text}] for text in ("the wall", "vines")]
CHAT = {"messages": ANSWERS[0]}
SIDES = {"prompt": "help me", "chosen": "the wall", "rejected": "vines"}
TRANSCRIPTS = {name: f"\n\nHuman: help me\n\nAssistant: {name}" for name in ("chosen", "rejected")}
OPENAI = {"input": {"messages": ASKED}, "preferred_output": ANSWERS[0][1:], "non_preferred_output": ANSWERS[1][1:]}


def lines(*rows: dict[str, Any], times: int = 1) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows * times)


def files(path: str, content: Mapping[str, str | bytes]) -> Written:
    """Files by their names below a folder; `path` of them is the layout (empty: all)."""

    def write(place: Path) -> Path:
        for name, text in content.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return place / path

    return write


def file(name: str, content: str | bytes) -> Written:
    """One file."""
    return files(name, {name: content})


def edges(names: str = "source,target", separator: str = ",") -> str:
    """Nine edges on nine nodes, below their header."""
    return f"{names}\n" + "".join(f"{node}{separator}{(7 * node + 1) % 9}\n" for node in range(9))


NODES = "id,label,part,size\n" + "".join(f"{n},{'ab'[n % 2]},{'train' if n < 7 else 'val'},{n / 2}\n" for n in range(9))


def table(ending: str) -> Written:
    def write(place: Path) -> Path:
        import pyarrow as pa
        from pyarrow import feather, parquet

        rows = pa.Table.from_pylist(TEXTS)
        if ending == ".parquet":
            parquet.write_table(rows, place / "rows.parquet")
        elif ending == ".feather":
            feather.write_feather(rows, place / "rows.feather")
        else:
            with pa.OSFile(str(place / f"rows{ending}"), "wb") as file, pa.ipc.new_stream(file, rows.schema) as stream:
                stream.write_table(rows)
        return place / f"rows{ending}"

    return write


def on_disk(place: Path) -> Path:
    """As `datasets.save_to_disk` writes."""
    (place / "train").mkdir()
    table(".arrow")(place).rename(place / "train" / "data-00000-of-00001.arrow")
    (place / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (place / "train" / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (place / "train" / "dataset_info.json").write_text("{}")
    return place


def edges_in_parquet(place: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"source": range(9), "target": [*range(1, 9), 0]}), place / "links.parquet")
    return place / "links.parquet"


def scipy_matrix(place: Path) -> Path:
    from scipy import sparse

    sparse.save_npz(place / "matrix.npz", sparse.random(9, 9, 0.4, format="csr", random_state=1))
    return place / "matrix.npz"


def many_graphs(place: Path) -> Path:
    ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [{"x": torch.rand(3, 2), "edge_index": ring, "y": torch.tensor([n % 2])} for n in range(12)]
    torch.save(graphs, place / "graphs.pt")
    return place / "graphs.pt"


def without_labels(place: Path) -> Path:
    torch.save({"x": torch.rand(9, 2), "edge_index": torch.tensor([[*range(9)], [*range(1, 9), 0]])}, place / "g.pt")
    return place / "g.pt"


def parts_of_a_scene(place: Path) -> Path:
    """A part a file."""
    inputs.blender(place)
    whole = json.loads((place / "transforms.json").read_text())
    (place / "transforms.json").unlink()
    parts = dict.fromkeys(frame["file_path"].partition("_")[0] for frame in whole["frames"])
    for part in parts:
        frames = [frame for frame in whole["frames"] if frame["file_path"].startswith(part)]
        name = {"validation": "val"}.get(part, part)
        (place / f"transforms_{name}.json").write_text(json.dumps({**whole, "frames": frames}))
    return place


def weights(place: Path) -> Path:
    return base_of(place / "weights", "byte level", TEMPLATES["chatml"])


FACTORY = {"preferences": {"file_name": "a.json", "ranking": True, "columns": {"prompt": "prompt"}}}
GRAPH, NODE, LINK = "a graph", 'task = "node"', 'task = "link"'
RING = {
    "directed": False,
    "multigraph": False,
    "graph": {},
    "nodes": [{"id": n, "label": "odd" if n % 2 else "even", "size": n / 60} for n in range(60)],
    "edges": [{"source": n, "target": (n + 1) % 60} for n in range(60)],
}
METIS = "60 60\n" + "".join(f"{(n - 1) % 60 + 1} {(n + 1) % 60 + 1}\n" for n in range(60))
GRAPHML = (
    '<?xml version="1.0"?><graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="undirected">'
    + "".join(f'<node id="{n}"/>' for n in range(60))
    + "".join(f'<edge source="{n}" target="{(n + 1) % 60}"/>' for n in range(60))
    + "</graph></graphml>"
)


LAYOUTS: dict[str, list[tuple[Written, str, str]]] = {
    "text: files, folders, globs": [
        (file("a.txt", "some text of a file " * 4000), "text", 'kind = "gpt"'),
        (files("", {"a.txt": "some text of a file " * 4000, "b/c.md": "more of it " * 400}), "text", 'kind = "gpt"'),
    ],
    "rows: `.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv`": [
        (file("a.jsonl", lines(*TEXTS)), "rows with text", 'kind = "gpt"'),
        (file("a.ndjson", lines(*TEXTS)), "rows with text", 'kind = "gpt"'),
        (file("a.json", json.dumps(TEXTS)), "rows with text", 'kind = "gpt"'),
        (
            file("a.csv", "text,url\r\n" + "".join(f"text {n} of words,x\r\n" for n in range(4000))),
            "rows with text",
            'kind = "gpt"',
        ),
        (
            file("a.tsv", "url\ttext\n" + "".join(f"x\ttext {n} of words\n" for n in range(4000))),
            "rows with text",
            'kind = "gpt"',
        ),
        (file("a.txt", lines(*TEXTS)), "rows with text", 'kind = "gpt"'),
        (file("a.jsonl.gz", gzip.compress(lines(*TEXTS).encode())), "rows with text", 'kind = "gpt"'),
        (
            file("a.csv", "story\n" + "".join(f"once {n} times\n" for n in range(4000))),
            "rows with story",
            'field = "story"',
        ),
    ],
    "`.parquet`": [(table(".parquet"), "rows with text", 'kind = "gpt"')],
    "`.arrow`, `.feather`, folders of `datasets.save_to_disk`": [
        (table(".arrow"), "rows with text", 'kind = "gpt"'),
        (table(".feather"), "rows with text", 'kind = "gpt"'),
        (on_disk, "rows with text", 'kind = "gpt"'),
    ],
    "a folder of Hugging Face": [
        (
            files("", {"README.md": "# x", "data/train.jsonl": lines(*TEXTS), "data/test.jsonl": lines(*TEXTS)}),
            "rows with text",
            'kind = "gpt"',
        )
    ],
    "OpenAI, Hugging Face": [(file("a.jsonl", lines(CHAT, times=9)), "conversations", "[tune]")],
    "ShareGPT": [(file("a.json", json.dumps(inputs.SHAREGPT)), "conversations", "[tune]")],
    "prompt and completion": [(file("a.jsonl", lines(*inputs.COMPLETIONS)), "conversations", "[tune]")],
    "Alpaca": [(file("a.jsonl", lines(*inputs.ALPACA)), "conversations", "[tune]")],
    'preferences (`tune.kind = "dpo"`)': [(file("a.jsonl", lines(SIDES, times=9)), "preferences", "dpo")],
    "OpenAI's preferences": [(file("a.jsonl", lines(OPENAI, times=9)), "preferences", "dpo")],
    "transcripts (HH-RLHF) as a prompt or a side": [
        (file("a.jsonl", lines(TRANSCRIPTS, times=9)), "preferences", "dpo")
    ],
    "LLaMA-Factory": [
        (
            files("", {"dataset_info.json": '{"a": {"file_name": "a.json"}}', "a.json": json.dumps(inputs.ALPACA)}),
            "conversations: it holds dataset_info.json",
            "[tune]",
        ),
        (
            files("", {"dataset_info.json": json.dumps(FACTORY), "a.json": json.dumps([SIDES] * 9)}),
            "preferences between two answers: it holds dataset_info.json",
            "dpo",
        ),
    ],
    "tables: `.csv`, `.tsv`, `.txt`, `.edges`, `.edgelist`, `.el`, `.parquet`": [
        (files("", {"edges.csv": edges(), "nodes.csv": NODES}), GRAPH, NODE),
        (files("x.csv", {"x.csv": edges(), "x.nodes.csv": NODES}), GRAPH, NODE),
        *((files("", {f"edges.{end}": edges("source target", " ")}), GRAPH, LINK) for end in ("txt", "edges", "el")),
        (files("", {"edges.csv.gz": gzip.compress(edges().encode())}), GRAPH, LINK),
        (file("g.tsv", edges("source\ttarget", "\t")), GRAPH, LINK),
        (file("g.txt", edges("source target", " ")), "columns called source and target", LINK),
        (file("g.edgelist", edges("# nine", " ")), "the numbers of two nodes", LINK),
        *(
            (file("g.csv", edges(names)), f"columns called {' and '.join(names.split(','))}", LINK)
            for names in (
                "src,dst",
                "from,to",
                "u,v",
                "source_id,target_id",
                ":START_ID,:END_ID",
                "FromNodeId,ToNodeId",
            )
        ),
        (edges_in_parquet, "columns called source and target", LINK),
    ],
    "SNAP, edge lists without a header": [(inputs.snap, "the numbers of two nodes", LINK)],
    "Matrix Market (`.mtx`), SciPy (`.npz`)": [
        (inputs.market, GRAPH, LINK),
        (lambda place: inputs.market(place).parent, GRAPH, LINK),
        (scipy_matrix, GRAPH, LINK),
    ],
    "arrays (`.npz`)": [(inputs.npz, GRAPH, NODE)],
    "networkx (`.json`, `.graphml`), METIS (`.metis`, `.graph`)": [
        (file("a.json", json.dumps(RING)), GRAPH, NODE),
        (file("a.graphml", GRAPHML), GRAPH, LINK),
        (file("a.metis", METIS), GRAPH, LINK),
    ],
    "PyG (`.pt`)": [
        (inputs.saved, GRAPH, NODE),
        (without_labels, GRAPH, LINK),
        (many_graphs, GRAPH, 'task = "graph"'),
    ],
    "OGB, Planetoid": [(inputs.ogb, GRAPH, NODE), (inputs.planetoid, GRAPH, NODE)],
    "Blender": [(parts_of_a_scene, "a scene", 'kind = "voxels"')],
    "nerfstudio, instant-ngp, Metashape": [(inputs.blender, "a scene", 'kind = "voxels"')],
    "LLFF": [(model_inputs.llff, "a scene", 'kind = "voxels"')],
    "Hugging Face": [(weights, "weights in Hugging Face's format", "initial =")],
    "GGUF": [(model_inputs.gguf, "weights in GGUF's format", "initial =")],
}
NAMED = {
    "`hf:NAME`, `python:stdlib`": ["python:stdlib", "hf:roneneldan/TinyStories"],
    "`pyg:Planetoid/Cora`, `python:imports`, `rmat:scale=16`, `planted:nodes=1000`": [
        "pyg:Planetoid/Cora", "python:imports", "rmat:scale=6", "planted:nodes=300",
    ],
}  # fmt: skip
"""What is named, not looked at; those that are not there without a network."""
CASES = [(f"{name} {number}", *case) for name, cases in LAYOUTS.items() for number, case in enumerate(cases)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machine.toml").write_text(MACHINE)
    (tmp_path / "given").mkdir()
    return tmp_path


def test_every_layout_of_the_page_is_tried() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    page = page[page.index("## Text") : page.index("## Recipes")]
    rows = re.findall(r"^\| (.+?) \| ", page, re.MULTILINE)
    named = {row for row in rows if row not in ("format", "---", "|---|---|", "column or key")}
    columns = re.findall(r"^\| (.+?) \| ", page[page.index("| column or key") : page.index("Before the plan")], re.M)
    assert named - set(columns) - {"PEFT"} == LAYOUTS.keys() | NAMED.keys()


@pytest.mark.parametrize(("write", "says", "holds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_recipe_of_a_layout_is_planned_and_its_data_is_read(
    home: Path, capsys: pytest.CaptureFixture[str], write: Written, says: str, holds: str
) -> None:
    place = write(home / "given")
    paths = [str(place.relative_to(home))]
    if holds == "dpo":
        paths.insert(0, str(weights(home).relative_to(home)))
    if holds == "initial =":
        (home / "text.txt").write_text("some text " * 4000)
        paths.append("text.txt")
    assert cli.main(["init", *paths]) == 0
    told = capsys.readouterr().out
    assert any(says in line and str(place.relative_to(home)) in line for line in told.splitlines())
    assert holds in (home / "recipe.toml").read_text()
    assert "First " not in told, "nothing has to be installed"
    assert cli.main(["plan", "recipe.toml", "--cluster", "machine.toml"]) == 0
    if "GGUF" not in says:  # that file's tokenizer has other tokens than its model
        workload_registry.open_workload(resolve("recipe.toml", []), waiting)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * path.startswith("python:"))
        for paths in NAMED.values()
        for path in paths
    ],
)
def test_what_is_named_has_a_recipe_that_can_be_planned(
    home: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    assert cli.main(["init", path]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: ")
    if not path.startswith(("hf:", "pyg:")):
        assert cli.main(["plan", "recipe.toml", "--cluster", "machine.toml"]) == 0


@pytest.mark.parametrize(
    ("path", "library", "extra"), [("hf:x/y", "datasets", "hub"), ("pyg:x", "torch_geometric", "graph")]
)
def test_a_library_that_is_not_there_is_named_with_how_to_install_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, library: str, extra: str
) -> None:
    monkeypatch.setattr(init, "find_spec", lambda name: None if name == library else name)
    assert cli.main(["init", path]) == 0
    assert f"First pip install 'espalier-train[{extra}]'" in capsys.readouterr().out


def test_an_adapter_is_named_with_what_it_goes_with(home: Path) -> None:
    with pytest.raises(UserError, match="holds an adapter of PEFT") as raised:
        init.look(str(inputs.adapters(home / "given")))
    assert "tune.adapter" in raised.value.do
