"""`espalier init PATH …`: a recipe for what lies there, with the options that people change. Imports no torch."""

from __future__ import annotations

import argparse
import ast
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import tomli_w

from espalier.config import defaults, recipe_file
from espalier.errors import UserError
from espalier.terminal import say
from espalier.units import plural, show_size

GRAPHS = ("rmat:", "planted:", "pyg:", "python:imports")
TEXTS = ("python:stdlib", "hf:")
EDGES = (".csv", ".npz", ".parquet")
SOURCE_COLUMNS = ("source", "src", "from", "head")
LARGE = 2 << 20
"""Bytes of text from which a trained tokenizer is worth its time."""


class Found(NamedTuple):
    """What lies at a path: `text`, `chats`, `pairs`, `graph`, `module` or `weights`, and a sentence on it. `needs`: the
    arguments of a module's `function` that have no default."""

    kind: str
    path: str
    says: str
    size: int = 0
    function: str = ""
    needs: tuple[str, ...] = ()


def run(arguments: argparse.Namespace) -> int:
    """Writes the recipe, says what it is for and how to go on. Raises UserError where paths do not go together."""
    target = Path(arguments.out)
    if target.exists():
        raise UserError(f"{target} exists.", do=f"--out {target.stem}-2.toml, or remove it")
    found = [look(path) for path in arguments.paths]
    for one in found:
        if one.kind == "module" and Path(one.path).expanduser().resolve().parent != target.resolve().parent:
            raise UserError(
                f"{target} would not lie beside {one.path}.",
                why="modules are imported from the recipe's folder",
                do=f"espalier init {one.path} --out {Path(one.path).parent / target.name}",
            )
    text = recipe(found, target)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror}.", do="--out FILE in a folder of yours"
        ) from None
    made = recipe_file.load(target, [])
    if getattr(made.model, "initial", None) is None:
        defaults.resolve(made)  # a recipe that cannot be used is our mistake, and is seen here
    if arguments.json:
        print(json.dumps({"recipe": str(target), "found": [one._asdict() for one in found]}))
    else:
        for one in found:
            say(f"{one.path}: {one.says}")
            if one.needs:
                say(f"First set model.arguments in {target}: `build` has no default for {', '.join(one.needs)}.")
        say(f"Wrote {target}. Next: espalier plan {target}, then espalier train {target}")
    return 0


# --- what lies there ---------------------------------------------------------------------------------------------


def look(path: str) -> Found:
    """What `path` is, by names and first lines. Raises UserError for what is not there or not known."""
    if path.startswith(GRAPHS):
        return Found("graph", path, "a graph")
    if path.startswith(TEXTS):
        return Found("text", path, "text", LARGE)
    place = Path(path).expanduser()
    if not place.exists():
        known = ", ".join((*TEXTS, *GRAPHS))
        raise UserError(f"There is nothing at {path}.", do=f"a file or folder, or one of {known}")
    if place.is_dir():
        return _folder(path, place)
    if place.suffix == ".py":
        return _module(path, place)
    if place.suffix in (".npz", ".pt", ".pth") or (place.suffix in EDGES and _edges(place)):
        return Found("graph", path, f"a graph ({show_size(place.stat().st_size)})")
    if place.suffix in EDGES:
        raise UserError(
            f"{path} is a table without a column of {', '.join(SOURCE_COLUMNS)}.",
            why="a graph is a table of edges, with features and labels in nodes.csv beside it; text is .txt or .jsonl",
            do="rename the columns to source and target, or write its text as JSON lines",
        )
    size = show_size(place.stat().st_size)
    if place.suffix == ".gguf":
        return Found("weights", path, f"weights in GGUF's format ({size})")
    kind, what = _rows(place)
    return Found(kind, path, f"{what} ({size})", place.stat().st_size)


def _rows(place: Path) -> tuple[str, str]:
    """What a file of text is by the keys of its first row, and in words; see docs/tune.md."""
    if place.suffix != ".jsonl":
        return "text", "text"
    with suppress(ValueError), place.open(encoding="utf-8", errors="replace") as file:
        row = json.loads(file.readline(LARGE))
        keys = set(row) if isinstance(row, dict) else set()
        if keys >= {"chosen", "rejected"}:
            return "pairs", "preferences between two answers"
        pair = keys >= {"prompt", "completion"} or keys >= {"instruction", "output"}
        if pair or keys & {"messages", "conversations"}:
            return "chats", "conversations"
    return "text", "text"


def _folder(path: str, place: Path) -> Found:
    if (place / "run.toml").exists():
        raise UserError(
            f"{path} holds a run.",
            why="a recipe is for data, or for weights to begin with",
            do=f"espalier export {path} --to hf, then espalier init {path}/export-hf; or espalier predict {path}",
        )
    if (place / "config.json").exists() and any(place.glob("*.safetensors")):
        return Found("weights", path, "weights in Hugging Face's format")
    edges = [file for suffix in EDGES if (file := place / f"edges{suffix}").exists()]
    planetoid = [*place.glob("ind.*.graph"), *place.glob("raw/ind.*.graph")]
    if edges or planetoid or (place / "raw" / "edge.csv.gz").exists() or (place / "metadata.yaml").exists():
        return Found("graph", path, "a graph")
    sizes = list(_sizes(place))
    if not sizes:
        raise UserError(f"{path} holds no files.", do="a folder with text, a graph or weights")
    kind, what = next((_rows(one) for one in sorted(place.glob("*.jsonl"))), ("text", "text"))
    return Found(kind, path, f"{plural(len(sizes), 'file')}, {show_size(sum(sizes))} of {what}", sum(sizes))


def _sizes(place: Path) -> Iterator[int]:
    for folder, inner, files in os.walk(place):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (Path(folder, name).stat().st_size for name in files if not name.startswith("."))


def _edges(place: Path) -> bool:
    """Whether a table is one of edges, by its name or the first line of a CSV file."""
    if "edge" in place.stem or place.suffix == ".npz":
        return True
    if place.suffix != ".csv":
        return False
    with place.open(encoding="utf-8", errors="replace") as file:
        names = [name.strip().strip('"').casefold() for name in file.readline().split(",")]
    return any(name in SOURCE_COLUMNS for name in names)


def _module(path: str, place: Path) -> Found:
    try:
        tree = ast.parse(place.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not Python: {error}.") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = [name for name in functions if not name.startswith("_")]
    if "build" not in functions:
        raise UserError(
            f"{path} has no function `build`.",
            why=f"it has {', '.join(names)}" if names else "it has no function",
            do="def build(): return model, dataset, loss   (docs/module.md)",
        )
    needs = tuple(_required(functions["build"].args))
    return Found("module", path, "a module with its function `build`", function=f"{place.stem}:build", needs=needs)


def _required(arguments: ast.arguments) -> Iterator[str]:
    """The names of arguments without a default."""
    placed = [*arguments.posonlyargs, *arguments.args]
    yield from (one.arg for one in placed[: len(placed) - len(arguments.defaults)])
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from (one.arg for one, default in named if default is None)


# --- the recipe --------------------------------------------------------------------------------------------------


def recipe(found: list[Found], target: Path) -> str:
    """The recipe for all of `found`. Raises UserError where there is no one recipe for them."""
    kinds = {one.kind for one in found}
    data = [one for one in found if one.kind != "weights"]
    if kinds == {"weights"}:
        found, data = [*found, one := Found("text", "python:stdlib", "text")], [one]
    elif len(kinds - {"weights"}) > 1 or (kinds != {"text"} and len(data) > 1) or kinds >= {"weights", "graph"}:
        told = ", ".join(f"{one.path} ({one.kind})" for one in found)
        raise UserError("There is no one recipe for these.", why=told, do="espalier init for each, with --out")
    make = {"text": _text, "chats": _tuned, "pairs": _tuned, "graph": _graph, "module": _own}[data[0].kind]
    head = "".join(f"# {one.path}: {one.says}.\n" for one in found)
    return f"{head}#\n#   espalier plan {target.name}\n#   espalier train {target.name}\n\n{make(found, data)}"


def _text(found: list[Found], data: list[Found]) -> str:
    weights = [one for one in found if one.kind == "weights"]
    if len(weights) > 1:
        raise UserError("One folder of weights is what a run starts from.", do="leave the others out")
    model = f"[model]\n{_key('initial', weights[0].path)}" if weights else '[model]\nkind = "gpt"\n# depth = 6\n'
    bpe = '# tokenizer = "bpe:4096"     # default: bytes\n' if sum(one.size for one in data) < LARGE else ""
    bpe = bpe or 'tokenizer = "bpe:4096"       # trained on all sources when the run begins\n'
    bpe = "" if weights else bpe
    several = len(data) > 1
    head, weight = ("[[data]]", "weight = 1\n") if several else ("[data]", "")
    tables = [f"{head}\n{_key('path', one.path)}{weight}{bpe}" for one in data]
    return "\n".join([model, *tables, "[train]\n# steps = 1000\n"])


def _tuned(found: list[Found], data: list[Found]) -> str:
    weights = [one for one in found if one.kind == "weights"]
    pairs = data[0].kind == "pairs"
    if len(weights) != 1 and (weights or pairs):
        raise UserError(
            f"Tuning on {data[0].says} begins with one folder of weights.",
            do=f"espalier init WEIGHTS {data[0].path}, where WEIGHTS is a Hugging Face folder or a .gguf file",
        )
    model = _key("initial", weights[0].path) if weights else '# depth = 6\n# initial = "FOLDER"        # weights\n'
    full = 'kind = "full"               # or "lora", with rank = 8, beside weights\n'
    kind = 'kind = "dpo"\nrank = 8\n' if pairs else full
    return f"[model]\n{model}\n[tune]\n{kind}\n[data]\n{_key('path', data[0].path)}\n[train]\n# steps = 1000\n"


def _graph(found: list[Found], data: list[Found]) -> str:
    return (
        '[model]\nkind = "sage"                # or gcn, gat, gin\n\n'
        f"[data]\n{_key('path', data[0].path)}\n"
        '[graph]\ntask = "node"                # or link, graph\n'
        "# fanout = [10, 10]          # neighbours of each layer\n\n"
        "[train]\n# steps = 200\n"
    )


def _own(found: list[Found], data: list[Found]) -> str:
    needs = data[0].needs
    values = ", ".join(f"{name} = 0" for name in needs)
    arguments = (
        f"arguments = {{ {values} }}     # set these: `build` has no default for them" if needs else "# arguments = {}"
    )
    return (
        f'[model]\nkind = "module"\n{_key("build", data[0].function)}{arguments}\n\n'
        "[train]\nsteps = 1000\nbatch_tokens = 32            # samples per step\n"
    )


def _key(name: str, value: str) -> str:
    return tomli_w.dumps({name: value})
