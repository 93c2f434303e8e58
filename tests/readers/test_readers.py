"""Nothing is taken for something else: after every change of its input a reader gives the same content, or says by name
what is another."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import inputs as given
import mutations as change
import pytest
from inputs import Reader, Reading
from registry import COMMAS, LINES, READERS

from espalier.recipe.errors import UserError

PACKAGE = Path(__file__).parents[2] / "src" / "espalier"

CHANGED = [reader for reader in READERS if reader.changed is not None]
OF_ROWS = [reader for reader in CHANGED if reader.changed and reader.changed[1] is not None]
NAMES = tuple(change.of_rows(LINES))


def named(readers: list[Reader]) -> dict[str, Any]:
    return {"argvalues": readers, "ids": [reader.name for reader in readers]}


def apply(reader: Reader, folder: Path, changed: change.Change) -> None:
    assert reader.changed is not None
    name, _, field = reader.changed
    file = folder / name
    file.write_bytes(changed(file.read_bytes(), field))


def both(reader: Reader, tmp_path: Path, changed: change.Change) -> tuple[Reading, Reading | UserError]:
    """What the good input gives, and the changed one."""
    for folder in (tmp_path / "good", tmp_path / "bad"):
        folder.mkdir()
    good = reader.read(reader.write(tmp_path / "good"))
    path = reader.write(tmp_path / "bad")
    apply(reader, tmp_path / "bad", changed)
    try:
        return good, reader.read(path)
    except UserError as refusal:
        return good, refusal


@pytest.mark.parametrize("mutation", change.HARMLESS)
@pytest.mark.parametrize("reader", **named(CHANGED))
def test_a_mark_and_carriage_returns_change_nothing(reader: Reader, mutation: str, tmp_path: Path) -> None:
    good, bad = both(reader, tmp_path, change.HARMLESS[mutation])
    assert isinstance(bad, Reading), bad
    if reader.name == "a.txt" and mutation == "carriage returns":
        return  # they are text
    assert bad.content == good.content


@pytest.mark.parametrize("reader", **named([reader for reader in CHANGED if "/" not in reader.changed[0]]))
def test_the_case_of_an_ending_does_not_matter(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    good = reader.read(reader.write(tmp_path / "small"))
    path = reader.write(tmp_path / "large")
    if path.is_dir():
        pytest.skip("the files of this folder have fixed names")
    for file in list((tmp_path / "large").iterdir()):
        file.rename(file.with_suffix(file.suffix.upper()))
    assert reader.read(path.with_suffix(path.suffix.upper())).content == good.content


@pytest.mark.parametrize("mutation", NAMES)
@pytest.mark.parametrize("reader", **named(OF_ROWS))
def test_a_changed_row_is_named_or_refused(reader: Reader, mutation: str, tmp_path: Path) -> None:
    assert reader.changed is not None
    assert reader.changed[1] is not None
    if not reader.changed[2] and mutation != "an unknown extra field":
        pytest.skip("no field of the object holds text")
    good, bad = both(reader, tmp_path, change.of_rows(reader.changed[1])[mutation])
    fresh = [str(bad)] if isinstance(bad, UserError) else [note for note in bad.notes if note not in good.notes]
    if mutation == "a renamed field" and isinstance(bad, UserError):
        assert change.EXTRA in str(bad) or repr(reader.changed[2]) in str(bad)
    elif mutation in ("an unknown extra field", "a renamed field"):
        assert change.EXTRA in " ".join(fresh)
    elif isinstance(bad, Reading) and bad.content != good.content:
        assert fresh or reads_cells_as_text(reader, mutation)


def reads_cells_as_text(reader: Reader, mutation: str) -> bool:
    """Every cell of a separated table is text, also one that reads 12.5."""
    separated = (COMMAS, change.TABS, change.SEMICOLONS)
    return bool(reader.changed) and reader.changed[1] in separated and mutation == "a number where text is meant"


def test_equal_rows_are_equal_in_every_format(tmp_path: Path) -> None:
    contents = set()
    for number, reader in enumerate(reader for reader in READERS if reader.name.startswith("text in")):
        (tmp_path / str(number)).mkdir()
        contents.add(reader.read(reader.write(tmp_path / str(number))).content)
    assert len(contents) == 1


def test_equal_chats_are_equal_in_every_format(tmp_path: Path) -> None:
    contents = set()
    names = [
        f"chats in {name}" for name in ("messages.jsonl", "conversations.json", "completions.jsonl", "alpaca.ndjson")
    ]
    for number, reader in enumerate(reader for reader in READERS if reader.name in names):
        (tmp_path / str(number)).mkdir()
        contents.add(reader.read(reader.write(tmp_path / str(number))).content)
    assert len(contents) == 1


@pytest.mark.parametrize("write", [given.npz, given.saved], ids=["arrays", "PyG"])
def test_an_unknown_array_is_named(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    good, more = given.graph(write(tmp_path)), given.graph(write(tmp_path / "more", unheard_of=[1.0, 2.0]))
    assert more.content == good.content
    assert any("unheard_of" in note for note in more.notes)


# --- no reader outside -------------------------------------------------------------------------------------------

OPENS = {
    "open", "read_text", "read_bytes", "loadtxt", "load_file", "safe_open", "ParquetFile", "read_table", "reader",
    "GGUFReader", "memmap", "GzipFile",
}  # fmt: skip
"""Functions that open a file for reading."""
GRAPH_MECHANISMS = ("disk_batches", "few_bits", "halo_exchange", "pattern_attention")
ROOMS = ("language", "graph", "radiance", "evaluate", "machine/cluster", "recipe")
ROOMS += tuple(f"mechanisms/{name}" for name in GRAPH_MECHANISMS)
ELSEWHERE: Mapping[str, str] = {
    "evaluate/lm_eval_harness.py": "tests/evaluate/test_lm_eval_harness.py",
    "graph/data/import_graph.py": "tests/graph/test_sources.py",
    "radiance/workload_row.py": "tests/radiance/test_workload.py",
}
"""Modules of readers of this machine's own files, or of files that another reader here has opened."""
OWN: Mapping[str, str] = {
    "machine/cluster/catalogue.py": "the catalogue of devices, in the package",
    "evaluate/checkpoint_watcher.py": "pipes",
    "mechanisms/few_bits/mega/package_file.py": "packages, whose every byte has a checksum",
    "recipe/cache_dir.py": "the cache's own notes",
    "recipe/data_table.py": "data files of the package",
    "recipe/data_hash.py": "bytes, for their hash alone",
    "recipe/foreign_files.py": "the edge itself",
    "recipe/import_function.py": "Python files that a recipe names",
    "recipe/records.py": "the records of the package",
    "recipe/serialization.py": "weights that were just written",
    "evaluate/eval_history.py": "the run log",
    "evaluate/low_priority.py": "the system's list of locks",
    "graph/data/condensed_file.py": "the layers of a run on disk",
    "mechanisms/disk_batches/inference.py": "the layers of a run on disk",
    "mechanisms/disk_batches/manifest.py": "packed batches",
    "mechanisms/disk_batches/disk_sampler.py": "packed batches",
    "graph/networks/graph_plan.py": "packed batches",
    "graph/data/kept_graph.py": "the graph that a run keeps",
    "mechanisms/few_bits/packed_run.py": "export --to packed",
    "graph/parts/partition_folder.py": "folders of parts",
    "graph/data/synthetic.py": "generated graphs",
    "mechanisms/pattern_attention/pattern.py": "the cache",
    "mechanisms/pattern_attention/plan_choice.py": "the cache",
    "language/token_shards.py": "the cache",
    "language/token_store.py": "the cache",
    "language/tune/chat_rows.py": "the cache",
    "language/tune/workload.py": "what a run keeps of its chats",
}
"""Modules of these rooms that read files of Espalier's own, and which."""


def opens(module: Path) -> Iterator[str]:
    """The functions in `OPENS` that a module calls, but `open` for writing."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            writes = any(isinstance(word, ast.Constant) and str(word.value)[:1] in "wxa" for word in node.args[-1:])
            if name in OPENS and not (name == "open" and writes):
                yield name


def test_no_reader_is_outside_this_suite() -> None:
    covered = {module for reader in READERS for module in reader.modules}
    files = {str(file.relative_to(PACKAGE)): file for room in ROOMS for file in (PACKAGE / room).rglob("*.py")}
    outside = {
        name: sorted(set(opens(file))) for name, file in files.items() if name not in covered | {*OWN, *ELSEWHERE}
    }
    assert {name: calls for name, calls in outside.items() if calls} == {}
    assert all((PACKAGE.parents[1] / suite).is_file() for suite in ELSEWHERE.values())
    assert set(OWN) | set(ELSEWHERE) <= set(files)
