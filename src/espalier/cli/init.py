"""`espalier init PATH …`: a recipe for what lies there, with the options that people change. Imports no torch."""

from __future__ import annotations

import argparse
import ast
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import tomli_w

from espalier.cli import text_template
from espalier.graph.data import edge_lists, table_columns
from espalier.language import row_files, text_sources
from espalier.language.row_files import Row, SourceFile
from espalier.recipe import Data, defaults, recipe_file
from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import UserError, missing_extra
from espalier.recipe.foreign_files import printable, read_text
from espalier.recipe.terminal import say
from espalier.recipe.units import plural, show_size

GRAPHS = ("rmat:", "planted:", "pyg:", "python:imports")
TEXTS = ("python:stdlib", "hf:")
ARRAYS = (".npz", ".pt", ".pth")
LABELS = ("y", "labels", "label", "node_label")
"""Names of arrays."""
TEXT_COLUMNS = ("text", "content", "raw_content", "document", "story")
CHAT_COLUMNS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
PAIR_COLUMNS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
ROW_KINDS = (("pairs", "preferences between two answers", PAIR_COLUMNS), ("chats", "conversations", CHAT_COLUMNS))
GRAPH_FILES = ("ind.*.graph", "raw/ind.*.graph", "raw/edge.csv.gz", "metadata.yaml")
WEIGHTS = ("pytorch_model*.bin", "model*.pth", "consolidated*.pth", "*.ckpt")
"""Pickles in which weights are found."""
_EDGES_NAME = re.compile(r"(?<![a-z])edges?(?![a-z])", re.IGNORECASE)
_EDGE = re.compile(rb"\s*\d+[ \t,;]+\d+([ \t,;]+[-+.\deE]+)?\s*")
"""A line of an edge list without a header: two numbers of nodes, perhaps a weight."""
NEEDS = (
    ("hf:", "datasets", "hub"),
    ("pyg:", "torch_geometric", "graph"),
    (".parquet", "pyarrow", "graph"),
)
"""Words of paths, and of what is said of them, whose recipes run with a library, and the extra that has it."""
LARGE = 2 << 20
"""Bytes of text from which a trained tokenizer is worth its time."""


class FoundData(NamedTuple):
    """What lies at a path: `text`, `chats`, `pairs`, `graph`, `scene`, `module` or `weights`, and a sentence on what it
    is and why. `needs`: the arguments of a module's `function` that have no default. `field`: the column of text.
    `task`: of a graph."""

    kind: str
    path: str
    says: str
    size: int = 0
    function: str = ""
    needs: tuple[str, ...] = ()
    field: str = ""
    task: str = "node"


def run(arguments: argparse.Namespace) -> int:
    """Writes the recipe, says what it is for and how to go on. Raises UserError where paths do not go together."""
    target = Path(arguments.out)
    if target.exists():
        raise UserError(f"{target} exists.", do=f"--out {target.stem}-2.toml, or remove it")
    finds = [look(path) for path in arguments.paths]
    for find in finds:
        if find.kind == "module" and Path(find.path).expanduser().resolve().parent != target.resolve().parent:
            raise UserError(
                f"{target} would not lie beside {find.path}.",
                why="modules are imported from the recipe's folder",
                do=f"espalier init {find.path} --out {Path(find.path).parent / target.name}",
            )
    text = recipe(finds, target)
    try:
        with writing(target, "--out FILE in a folder of yours"):
            target.write_text(text, encoding="utf-8")
    except UnicodeEncodeError:
        raise UserError(f"The name of {printable(arguments.paths)} is not UTF-8.", do="rename it") from None
    made = recipe_file.load(target, [])
    if getattr(made.model, "initial", None) is None:
        defaults.resolve(made)  # a recipe that cannot be used is our mistake, and is seen here
    if arguments.json:
        print(json.dumps({"recipe": str(target), "found": [find._asdict() for find in finds]}))
    else:
        for find in finds:
            _tell(find, target)
        say(f"Wrote {target}. Next: espalier plan {target}, then espalier train {target}")
    return 0


def _tell(find: FoundData, target: Path) -> None:
    """What was taken for what, and what has to be done first."""
    say(f"{printable(find.path)}: {find.says}")
    if find.needs:
        say(f"First set model.arguments in {target}: `build` has no default for {', '.join(find.needs)}.")
    for word, library, extra in NEEDS:
        if word in f"{find.path} {find.says}" and find_spec(library) is None:
            say(f"First {missing_extra(library, extra, word).do}")


# --- what lies there ---------------------------------------------------------------------------------------------


def look(path: str) -> FoundData:
    """What `path` is, by names and first lines. Raises UserError for what is not there or not known."""
    if path.startswith(GRAPHS):
        return FoundData("graph", path, "a graph")
    if path.startswith(TEXTS):
        return FoundData("text", path, "text", LARGE)
    place = Path(path).expanduser()
    if not place.exists():
        known = ", ".join((*TEXTS, *GRAPHS))
        raise UserError(f"There is nothing at {path}.", do=f"a file or folder, or one of {known}")
    if place.is_dir():
        return _folder(path, place)
    if place.suffix == ".py":
        return _module(path, place)
    return _file(path, place)


def _file(path: str, place: Path) -> FoundData:
    size = show_size(place.stat().st_size)
    entry = SourceFile(place.name, str(place), place.stat().st_size, 0)
    ending = row_files.ending_of(place.name)
    if ending == ".gguf":
        return FoundData("weights", path, f"weights in GGUF's format ({size})")
    if place.name.startswith("transforms") and ending == ".json":
        return FoundData("scene", path, f"a scene: it holds cameras ({size})")
    if any(map(place.match, WEIGHTS)):
        raise _pickled(path, place.parent)
    if ending in (".graphml", *edge_lists.METIS) or (ending == ".json" and _holds_links(entry)):
        labelled = any(f'"{name}"'.encode() in row_files.head_of(entry) for name in LABELS)
        return FoundData("graph", path, f"a graph ({size})", task="node" if labelled else "link")
    if ending in ARRAYS or (why := _edges(entry, place)):
        says = f"a graph: {'arrays' if ending in ARRAYS else why} ({size})"
        return FoundData("graph", path, says, task=_task(place))
    if ending in row_files.BINARY:
        raise UserError(
            f"{printable(path)} is no text, graph or weights that are read: {ending} files are not.",
            do="write its text as .txt or .jsonl, its edges as .csv or .parquet",
        )
    content = _rows(entry, path)
    return content._replace(says=f"{content.says} ({size})")


def _holds_links(entry: SourceFile) -> bool:
    """Whether a file of JSON is a graph as networkx writes it."""
    keys = {"nodes", "links", "edges"}.intersection(row_files.first_keys(row_files.head_of(entry)))
    return len(keys) == 2 and "nodes" in keys


def _rows(entry: SourceFile, path: str) -> FoundData:
    """What a file of text is by its content and the columns of its first row; see docs/tune.md."""
    form = row_files.look(entry, row_files.CHAT_KEYS | set(TEXT_COLUMNS))
    if form == "text":
        return FoundData("text", path, "text: no list of edges, and no rows with known columns", entry.size)
    if form == "document":
        raise _no_column(path, dict.fromkeys(row_files.first_keys(row_files.head_of(entry))))
    _, row = next(row_files.rows(entry, form), ("", {}))
    columns = {name for name, value in row.items() if value is not None}
    for kind, what, choices in ROW_KINDS:
        for names in filter(columns.issuperset, choices):
            return FoundData(kind, path, f"{what}: rows with {' and '.join(names)}", entry.size)
    field = next((name for name in TEXT_COLUMNS if isinstance(row.get(name), str)), None)
    if field is None:
        raise _no_column(path, row)
    return FoundData("text", path, f"text: rows with {field}", entry.size, field=field if field != "text" else "")


def _no_column(path: str, row: Row) -> UserError:
    return UserError(
        f"{printable(path)} has no columns of edges (source and target), and no text or chats.",
        why=f"it has {printable(', '.join(map(str, row))) or 'no rows'}; a graph is a table of edges, with nodes.csv",
        do="rename the columns of edges to source and target, that of text to text",
    )


def _pickled(path: str, folder: Path) -> UserError:
    code = "transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    return UserError(
        f"{printable(path)} holds weights as a pickle, and no .safetensors.",
        why="unpickling can execute arbitrary code",
        do=f"convert them with {code.replace('FOLDER', repr(str(folder)))}, then espalier init",
    )


def _folder(path: str, place: Path) -> FoundData:
    if (place / "run.toml").exists():
        raise UserError(
            f"{path} holds a run.",
            why="a recipe is for data, or for weights to begin with",
            do=f"espalier export {path} --to hf, then espalier init {path}/export-hf; or espalier predict {path}",
        )
    if (place / "config.json").exists() and any(place.glob("*.safetensors")):
        return FoundData("weights", path, "weights in Hugging Face's format: config.json and .safetensors")
    if (place / "adapter_config.json").exists():
        raise UserError(
            f"{path} holds an adapter of PEFT, without the weights it is for.",
            do=f"espalier init WEIGHTS CHATS, then tune.kind = 'lora' and tune.adapter = {path!r}",
        )
    files = _matching(place, ("*.gguf", "*.safetensors"))
    if len(files) == 1 and files[0].suffix == ".gguf":
        return _file(str(Path(path) / files[0].name), files[0])
    if files:
        names = printable(", ".join(file.name for file in files))
        raise UserError(f"{path} holds weights without a config.json.", why=names, do="name one .gguf file, or add it")
    if _matching(place, WEIGHTS):
        raise _pickled(path, place)
    if scene := _matching(place, ("transforms*.json", "poses_bounds.npy")):
        return FoundData("scene", path, f"a scene: {printable(scene[0].name)} holds cameras")
    edges = edge_lists.beside(place, "edges", edge_lists.SUFFIXES)
    if graph := edges + _matching(place, GRAPH_FILES):
        says = f"a graph: it holds {printable(graph[0].relative_to(place))}"
        return FoundData("graph", path, says, task=_task(edges[0]) if graph == edges[:1] else "node")
    return _documents(path, place)


def _matching(place: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of a folder, of each pattern in order."""
    return [file for pattern in patterns for file in sorted(place.glob(pattern))]


def _documents(path: str, place: Path) -> FoundData:
    """A folder of text or of rows, by the first file of rows in it."""
    try:
        listing = text_sources.listing(Data(path=str(place)))
    except UserError as error:
        raise UserError(f"{printable(path)}: {error.what}", why=error.why, do=error.do) from None
    entries = listing.entries
    readable = [entry for entry in entries if row_files.ending_of(entry.name) not in row_files.BINARY]
    if not readable:
        kinds = sorted({row_files.ending_of(entry.name) for entry in entries})
        raise UserError(
            f"{printable(path)} holds no text, graph, scene or weights that are known: {', '.join(kinds)} files.",
            do="a folder with text, rows (.jsonl, .json, .csv, .parquet), edges, transforms.json or .safetensors",
        )
    if len(readable) == 1 and _edges(entry := readable[0], Path(entry.path)):
        return _file(str(Path(path) / entry.name), Path(entry.path))
    size = sum(entry.size for entry in readable)
    many = f"{plural(len(readable), 'file')}, {show_size(size)} of "
    if listing.tables:
        pairs = any(table.get("ranking") for table in listing.tables.values())
        kind, what, _ = ROW_KINDS[not pairs]
        return FoundData(kind, path, f"{many}{what}: it holds dataset_info.json", size)
    rows = [entry for entry in readable if row_files.ending_of(entry.name) in row_files.ENDINGS]
    plain = len(rows) < len(readable)
    first = next((_rows(entry, path) for entry in rows if not plain or _is_rows(entry)), None)
    if first is None:
        return FoundData("text", path, f"{many}text: no graph, scene or weights, and no rows with known columns", size)
    return first._replace(says=f"{many}{first.says}", size=size)


def _task(edges: Path) -> str:
    """What a list of edges is good for: without a table of nodes no node has a label, and links are learned."""
    if row_files.ending_of(edges.name) in ARRAYS and zipfile.is_zipfile(edges):
        with zipfile.ZipFile(edges) as archive:
            tables = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
            # What begins with an empty list is a list of graphs.
            if any(table[2:3] == b"]" for table in tables):
                return "graph"
            labels = [name for name in archive.namelist() if name.partition(".")[0] in LABELS]
            return "node" if labels or any(b"\1\0\0\0y" in table for table in tables) else "link"
    named = any(any(edges.parent.glob(f"{name}.*")) for name in (f"{edges.name.partition('.')[0]}.nodes", "nodes"))
    return "node" if named or row_files.ending_of(edges.name) in ARRAYS else "link"


def _is_rows(entry: SourceFile) -> bool:
    return row_files.look(entry, row_files.CHAT_KEYS | set(TEXT_COLUMNS)) not in ("text", "document", "table")


def _edges(entry: SourceFile, place: Path) -> str:
    """Why a file is a list of edges: by its name, its header or its first lines; empty: it is none."""
    ending = row_files.ending_of(entry.name)
    if ending in (".mtx", ".parquet", *row_files.TABLES) and (_EDGES_NAME.search(place.stem) or ending == ".mtx"):
        return "its name says so"
    if ending == ".parquet":
        names = row_files.parquet_columns(entry)
        numbers = []
    elif ending in row_files.BINARY:
        return ""
    else:
        head = row_files.head_of(entry)
        lines = head[:4096].splitlines()
        lines = lines[:-1] if len(head) > 4096 else lines
        lines = [line for line in lines if line.strip() and line.lstrip()[:1] not in (b"#", b"%")]
        numbers = list(map(_EDGE.fullmatch, lines))
        headed = lines and (ending in row_files.TABLES or (numbers[1:] and all(numbers[1:])))
        names = re.split(r"[,;|\t ]", lines[0].decode("utf-8", "replace").replace('"', "")) if headed else []
    if ends := table_columns.end_names(names):
        return f"columns called {' and '.join(ends)}"
    return "each line has the numbers of two nodes" if len(numbers) > 1 and all(numbers) else ""


def _module(path: str, place: Path) -> FoundData:
    try:
        tree = ast.parse(read_text(place))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(f"{printable(path)} is not Python: {printable(error)}.") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = [name for name in functions if not name.startswith("_")]
    if "build" not in functions:
        raise UserError(
            f"{path} has no function `build`.",
            why=f"it has {', '.join(names)}" if names else "it has no function",
            do="def build(): return model, dataset, loss   (docs/module.md)",
        )
    needs = tuple(_required(functions["build"].args))
    return FoundData("module", path, "a module with its function `build`", function=f"{place.stem}:build", needs=needs)


def _required(arguments: ast.arguments) -> Iterator[str]:
    """The names of arguments without a default."""
    placed = [*arguments.posonlyargs, *arguments.args]
    yield from (argument.arg for argument in placed[: len(placed) - len(arguments.defaults)])
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from (argument.arg for argument, default in named if default is None)


# --- the recipe --------------------------------------------------------------------------------------------------


def recipe(finds: list[FoundData], target: Path) -> str:
    """The recipe for all of `finds`. Raises UserError where there is no one recipe for them."""
    weights = [find for find in finds if find.kind == "weights"]
    data = [find for find in finds if find.kind != "weights"]
    kinds = {find.kind for find in data}
    if not data:
        data = [FoundData("text", "python:stdlib", "text")]
        finds = [*finds, *data]
    elif (
        len(kinds) > 1 or ((weights or kinds != {"text"}) and len(data) > 1) or (weights and kinds & {"graph", "scene"})
    ):
        listing = ", ".join(f"{find.path} ({find.kind})" for find in finds)
        raise UserError("There is no one recipe for these.", why=listing, do="espalier init for each, with --out")
    _refuse_weights(weights, data[0])
    return text_template.render(
        "init_recipe.toml.j2",
        {"printable": printable, "toml": lambda value: tomli_w.dumps({"": value}).partition(" = ")[2].strip()},
        sources=finds,
        name=printable(target.name),
        kind=data[0].kind,
        weights=weights,
        data=data,
        large=sum(source.size for source in data) >= LARGE,
    )


def _refuse_weights(weights: list[FoundData], data: FoundData) -> None:
    """Raises UserError where a run on `data` begins with other weights than these."""
    if data.kind == "text" and len(weights) > 1:
        raise UserError("One folder of weights is what a run starts from.", do="leave the others out")
    if (data.kind == "pairs" and len(weights) != 1) or (data.kind == "chats" and len(weights) > 1):
        raise UserError(
            f"Tuning on {data.says} begins with one folder of weights.",
            do=f"espalier init WEIGHTS {data.path}, where WEIGHTS is a Hugging Face folder or a .gguf file",
        )
