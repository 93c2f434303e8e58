"""The source reads no pickle but where a line here says why that is safe, or that the user has asked for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "espalier"

ALLOWED = {
    "checkpoint/dcp_metadata.py": {"pickle"},  # an allow-list of names and opcodes
    "graph/data/numpy_pickle.py": {"pickle"},  # an allow-list of arrays
    "graph/data/pyg.py": {"torch.load"},  # weights only, unless graph.pickle = true
    "machine/measure.py": {"multiprocessing"},  # bytes between a process and those it forked
    "evaluate/worker_pool.py": {"multiprocessing", "ProcessPoolExecutor"},  # with its own processes, nothing of a file
}
MODULES = {
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing",
    "ProcessPoolExecutor",
}


def found(source: str) -> Iterator[str]:
    """What in `source` may run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
            yield from (one.name for one in node.names if one.name == "ProcessPoolExecutor")
        elif isinstance(node, ast.Call):
            yield called(node)


def called(node: ast.Call) -> str:
    """The name of a call that may run what it is given, else what is looked for nowhere."""
    name = ast.unparse(node.func)
    options = {one.arg: ast.unparse(one.value) for one in node.keywords}
    if name.endswith((".load", ".load_from")) and name.startswith("torch"):
        return "" if options.get("weights_only") == "True" else "torch.load"
    if name.endswith(".recv") and not node.args:
        return "Connection.recv"
    if options.get("allow_pickle", "False") != "False":
        return "allow_pickle"
    if name.endswith(("_object", "_object_list")) and name.split(".")[-1].startswith(
        ("all_gather", "gather", "scatter", "broadcast", "send", "recv")
    ):
        return "object collective"
    return name if name in ("eval", "exec", "yaml.load", "yaml.unsafe_load") else ""


READERS = {
    "torch.load",
    "Connection.recv",
    "allow_pickle",
    "object collective",
    "eval",
    "exec",
    "yaml.load",
    "yaml.unsafe_load",
}
FORBIDDEN = MODULES | READERS


def test_nothing_unpickles_but_where_it_is_said() -> None:
    there = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := set(found(path.read_text(encoding="utf-8"))) & FORBIDDEN)
    }
    assert there == ALLOWED


def test_the_search_finds_what_it_is_for() -> None:
    bad = {
        "import pickle": "pickle",
        "from multiprocessing.connection import Pipe": "multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor": "ProcessPoolExecutor",
        "import torch\ntorch.load(x)": "torch.load",
        "torch.load(x, weights_only=False)": "torch.load",
        "dist.all_gather_object(a, b)": "object collective",
        "dist.broadcast_object_list(a, 0)": "object collective",
        "np.load(x, allow_pickle=True)": "allow_pickle",
        "eval(x)": "eval",
    }
    for source, name in bad.items():
        assert set(found(source)) & FORBIDDEN == {name}
    assert not set(found("torch.load(x, weights_only=True)\nmodel.eval()\nnp.load(x)")) & FORBIDDEN
