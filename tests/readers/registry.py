"""The registry of readers: every reader of files that other programs wrote, with a small good input.

A reader that is no row here is found by `test_no_reader_is_outside_this_suite`; every row is fuzzed (`test_fuzz.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import inputs as given
import model_inputs as models
import mutations as change
from inputs import Reader, Reading

LINES, LIST, COMMAS = change.LINES, change.LIST, change.COMMAS
ROWS = ("language/row_files.py", "language/text_sources.py", "language/data_folder.py")
CHATS = (*ROWS, "language/tune/conversations.py", "language/tune/row_formats.py")


def rows_of(name: str, rows: list[dict[str, Any]], syntax: change.Syntax) -> Callable[[Path], Path]:
    return given.written(name, syntax.dumps(rows))


def texts(name: str, syntax: change.Syntax) -> Reader:
    return Reader(f"text in {name}", ROWS, rows_of(name, given.TEXT_ROWS, syntax), given.text, (name, syntax, "text"))


def chats(name: str, rows: list[dict[str, Any]], syntax: change.Syntax, field: str) -> Reader:
    return Reader(f"chats in {name}", CHATS, rows_of(name, rows, syntax), given.chats, (name, syntax, field))


TABLES = (
    "graph/data/separated_text.py",
    "graph/data/table_columns.py",
    "graph/data/edge_lists.py",
    "graph/data/graph_formats.py",
    "mechanisms/disk_batches/features.py",
)
SCENES = ("radiance/scenes.py", "radiance/transforms_file.py", "radiance/pictures.py")


def table(name: str, separator: str, ending: str, syntax: change.Syntax) -> Reader:
    return Reader(name, TABLES, given.tables(separator, ending), given.graph, (f"nodes{ending}", syntax, "label"))


def scene(name: str, syntax: change.Syntax, field: str) -> Reader:
    return Reader(name, SCENES, given.blender, given.scene, ("transforms.json", syntax, field))


def plain(name: str, modules: tuple[str, ...], text: str, read: Callable[[Path], Reading]) -> Reader:
    return Reader(name, modules, given.written(name, text.encode()), read, (name, None, ""))


READERS = [
    plain("a.txt", ROWS, "\n".join(given.TEXTS), given.text),
    *(texts(f"rows{ending}", LINES) for ending in (".jsonl", ".ndjson", ".json")),
    texts("list.json", LIST),
    texts("table.csv", COMMAS),
    texts("table.tsv", change.TABS),
    Reader("text in Parquet", ROWS, given.parquet("a.parquet", given.TEXT_ROWS), given.text),
    chats("messages.jsonl", given.MESSAGES, LINES, "messages"),
    chats("conversations.json", given.SHAREGPT, LIST, "conversations"),
    chats("completions.jsonl", given.COMPLETIONS, LINES, "completion"),
    chats("completions.csv", given.COMPLETIONS, COMMAS, "completion"),
    chats("alpaca.ndjson", given.ALPACA, LINES, "output"),
    chats("preferences.jsonl", given.PAIRS, LINES, "chosen"),
    Reader("chats in Parquet", CHATS, given.parquet("a.parquet", given.COMPLETIONS), given.chats),
    table("edges.csv", ",", ".csv", COMMAS),
    table("edges.tsv", "\t", ".tsv", change.TABS),
    table("semicolons", ";", ".csv", change.SEMICOLONS),
    Reader("Matrix Market", TABLES, given.market, given.graph, ("graph.mtx", None, "")),
    Reader("METIS", TABLES, given.metis, given.graph, ("graph.metis", None, "")),
    Reader("node-link JSON", TABLES, given.node_link(".json"), given.graph, ("graph.json", None, "")),
    Reader("GraphML", TABLES, given.node_link(".graphml"), given.graph, ("graph.graphml", None, "")),
    Reader("SNAP", TABLES, given.snap, given.graph, ("graph.txt", None, "")),
    Reader("arrays", ("graph/data/array_file.py",), given.npz, given.graph),
    Reader("PyG", ("graph/data/pyg.py",), given.saved, given.graph),
    Reader("OGB", ("graph/data/ogb.py",), given.ogb, given.graph),
    Reader("Planetoid", ("graph/data/planetoid.py", "graph/data/numpy_pickle.py"), given.planetoid, given.graph),
    scene("scene", change.OBJECT, ""),
    scene("frames", change.FRAMES, "file_path"),
    Reader(
        "Hugging Face",
        ("language/hf.py",),
        given.hugging_face,
        given.weights,
        ("weights/config.json", change.OBJECT, "hidden_size"),
    ),
    Reader(
        "adapters",
        ("language/tune/peft.py",),
        given.adapters,
        given.low_rank,
        ("adapter_config.json", change.OBJECT, "peft_type"),
    ),
    plain("c.toml", ("machine/cluster/file.py",), given.CLUSTER, given.cluster),
    plain("r.toml", ("recipe/recipe_file.py",), given.RECIPE, given.recipe),
    Reader(
        "questions",
        ("evaluate/multiple_choice.py",),
        rows_of("q.jsonl", given.QUESTIONS, LINES),
        given.questions,
        ("q.jsonl", LINES, "question"),
    ),
    Reader("GGUF", ("language/gguf_file.py", "language/gguf_header.py"), models.gguf, models.of_gguf),
    Reader("tokenizer", ("language/tokenizer_files.py", "language/tokenizer.py"), models.tokenizer, models.tokens),
    Reader("chat template", ("language/tune/chat_template.py",), models.template, models.rendered),
    Reader("LLFF", ("radiance/llff_folder.py", "radiance/pictures.py"), models.llff, given.scene),
    Reader("run folder", ("track/events.py", "track/run_tables.py", "track/report.py"), models.run, models.report),
]
