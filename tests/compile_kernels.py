"""Compiles the kernels into numba's cache on disk before tests run: each once, in as many processes as there are cores.

Workers of pytest would otherwise all compile the same ones at their start. Nothing is done where nothing has changed:
a note beside the cache says which sources were compiled, and a lock lets one session compile at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

SPEC = importlib.util.find_spec("espalier")
assert SPEC is not None
assert SPEC.origin is not None
PACKAGE = Path(SPEC.origin).parent
CACHE = PACKAGE / "kernels" / "__pycache__"


def sources() -> list[Path]:
    """The files with kernels, and with functions that kernels call."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "kernels.numba_compile import" in path.read_text("utf-8")]


def state(files: list[Path]) -> dict[str, Any]:
    """What was compiled, and where it lies."""
    texts = [path.read_bytes() for path in (PACKAGE / "kernels" / "numba_compile.py", *files)]
    texts += [sys.version.encode(), importlib.metadata.version("numba").encode()]
    found = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("__pycache__/*.nbi"))
    return {"sources": hashlib.sha256(b"\0".join(texts)).hexdigest(), "compiled": found}


def kernels(files: list[Path]) -> list[tuple[str, str]]:
    """(module, name) of every kernel, the longest first."""
    from espalier.kernels.numba_compile import Kernel

    found = {}
    for path in files:
        module = importlib.import_module(".".join(("espalier", *path.relative_to(PACKAGE).with_suffix("").parts)))
        for name, one in vars(module).items():
            if isinstance(one, Kernel) and one.body.__module__ == module.__name__:
                found[module.__name__, name] = len(one.body.__code__.co_code) * len(one._signatures)
    return sorted(found, key=lambda key: -found[key])


def compile_kernel(place: tuple[str, str]) -> None:
    """All its dtypes in one process: numba's index of a function is not made for two that write at once."""
    module, name = place
    getattr(sys.modules[module], name).compile()


def load() -> None:
    """Loads all kernels into this process, so that its forks need not: 0.7 s."""
    for place in kernels(sources()):
        compile_kernel(place)


def main() -> None:
    """Compiles what is not compiled yet."""
    CACHE.mkdir(exist_ok=True)
    note = CACHE / "compiled.json"
    with note.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = sources()
        if note.exists() and json.loads(note.read_text()) == state(files):
            return
        places = kernels(files)
        sys.stderr.write(f"{len(places)} kernels are compiled, once\n")
        with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
            pool.map(compile_kernel, places, chunksize=1)
        note.write_text(json.dumps(state(files)))


if __name__ == "__main__":
    main()
