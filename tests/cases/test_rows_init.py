"""`espalier init` takes a path for what it is and says why; nothing of a name becomes a line of the recipe."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_inputs import lines, put

from espalier.cli import init
from espalier.cli import main as cli

MARK = b"\xef\xbb\xbf"
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]


CHAT = lines({"messages": TURNS}, {"messages": TURNS})
LOOKS: dict[str, tuple[dict[str, bytes], str]] = {
    "scene": ({"scene/transforms.json": b"{}", "scene/images/a.png": b""}, "voxels"),
    "llff": ({"llff/poses_bounds.npy": b"", "llff/images/a.jpg": b""}, "voxels"),
    "c.json": ({"c.json": CHAT}, "tune"),
    "c.NDJSON": ({"c.NDJSON": MARK + CHAT}, "tune"),
    "c.csv": ({"c.csv": b"instruction,input,output\na,,b\n"}, "tune"),
    "hf": ({"hf/README.md": b"# x", "hf/data/train-0.jsonl": CHAT, "hf/data/test-0.jsonl": CHAT}, "tune"),
    "factory": ({"factory/dataset_info.json": b'{"a": {"file_name": "a.json"}}', "factory/a.json": b"[{}]"}, "tune"),
    "snap.txt": ({"snap.txt": b"# FromNodeId ToNodeId\n0\t1\n0\t2\n3\t4\n"}, "sage"),
    "m.mtx": ({"m.mtx": b"%%MatrixMarket matrix coordinate pattern general\n2 2 1\n1 2\n"}, "sage"),
    "knowledge.csv": ({"knowledge.csv": b"text,url\na,b\n"}, "gpt"),
    "rows.txt": ({"rows.txt": lines({"text": "a"}, {"text": "b"})}, "gpt"),
    "code": ({"code/a.py": b"x = 1", "code/package.json": b"{}"}, "gpt"),
}


@pytest.mark.parametrize("path", LOOKS)
def test_init_says_what_it_takes_a_path_for_and_why(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files, kind = LOOKS[path]
    for name, content in files.items():
        put(tmp_path, name, content)
    assert cli.main(["init", path]) == 0
    made = tomllib.loads((tmp_path / "recipe.toml").read_text())
    assert "tune" in made if kind == "tune" else made["model"]["kind"] == kind
    assert made["data"]["path"] == path
    assert f"{path}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "task"),
    [
        (["edges.csv"], "link"),
        (["edges.csv", "nodes.csv"], "node"),
        (["edges.csv", "nodes.parquet"], "node"),
        (["x.csv", "x.nodes.csv"], "node"),
        (["x.csv", "y.nodes.csv"], "link"),
        (["m.mtx"], "link"),
        (["g.npz"], "node"),
    ],
)
def test_links_are_what_edges_without_a_table_of_nodes_are_good_for(
    names: list[str], task: str, tmp_path: Path
) -> None:
    for name in names:
        put(tmp_path, name, b"source,target\n0,1\n")
    made = tomllib.loads(init.recipe([init.look(str(tmp_path / names[0]))], Path("r.toml")))
    assert made["graph"]["task"] == task


@pytest.mark.parametrize(
    ("files", "path", "says"),
    [
        ({"w/config.json": b"{}", "w/pytorch_model.bin": b"PK"}, "w", "save_pretrained"),
        ({"w/pytorch_model.bin": b"PK"}, "w/pytorch_model.bin", "save_pretrained"),
        ({"a/a.png": b"", "a/b.png": b""}, "a", ".png files"),
        ({"a.pdf": b"%PDF"}, "a.pdf", ".pdf files are not"),
        ({"a.json": b'{\n"name": 1}'}, "a.json", "it has name"),
        ({"a.jsonl": lines({"story": 1})}, "a.jsonl", "it has story"),
        ({"p/adapter_config.json": b"{}", "p/adapter_model.safetensors": b"", "p/tokenizer.json": b"{}"}, "p", "PEFT"),
        ({"w/model.safetensors": b"", "w/tokenizer.json": b"{}"}, "w", "without a config.json"),
        ({"g/a-q4.gguf": b"", "g/a-q8.gguf": b"", "g/README.md": b"# a"}, "g", "a-q4.gguf, a-q8.gguf"),
    ],
)
def test_init_refuses_what_no_recipe_reads(
    files: dict[str, bytes],
    path: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        put(tmp_path, name, content)
    assert cli.main(["init", path]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "recipe.toml").exists()


def test_init_takes_a_folder_with_one_gguf_file_for_these_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "g/model.gguf", b"GGUF")
    put(tmp_path, "g/Modelfile", "FROM ./model.gguf")
    assert cli.main(["init", "g"]) == 0
    assert tomllib.loads((tmp_path / "recipe.toml").read_text())["model"]["initial"] == "g/model.gguf"


@settings(max_examples=25, deadline=None)
@given(name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=40))
def test_nothing_of_a_name_becomes_a_line_of_the_recipe(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("init")
    for given_name in (f"{name}.txt", f"a\n[launch]\ncommand = {name!r}\n#.txt"):
        file = put(folder, given_name.replace("/", "_"), "hello world. " * 10)
        target = folder / "recipe.toml"
        target.unlink(missing_ok=True)
        assert cli.main(["init", str(file), "--out", str(target)]) == 0
        made = tomllib.loads(target.read_text(encoding="utf-8"))
        assert made["data"]["path"] == str(file)
        assert set(made) == {"model", "data", "train"}
