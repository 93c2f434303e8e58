"""Compiles the kernels into numba's cache on disk before tests run: each once, in as many processes as there are cores.

Workers of pytest would otherwise all compile the same ones at their start. Nothing is done where nothing has changed:
a note beside the cache says which sources were compiled, and a lock lets one session compile at a time. The code is
also kept in the user's cache folder by the hash of its source, so that another clone copies it (numba compares the
sources by content).
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
import shutil
import sys
from pathlib import Path
from typing import Any

from espalier.recipe.cache_dir import cache_folder

SPEC = importlib.util.find_spec("espalier")
assert SPEC is not None
assert SPEC.origin is not None
PACKAGE = Path(SPEC.origin).parent
CACHE = PACKAGE / "kernels" / "__pycache__"
KEPT = cache_folder() / "kernels"
NOTE = "compiled.json"


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


def kept(path: Path) -> Path:
    """The folder with the code of the kernels in `path`: of this module's name and text, processor, Python and numba.
    Code names the modules of the functions that it calls."""
    from llvmlite import binding

    made = f"{sys.version} {importlib.metadata.version('numba')} {binding.get_host_cpu_name()}"
    made += binding.get_host_cpu_features().flatten()
    name = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else path.name
    texts = [made.encode(), name.encode(), (PACKAGE / "kernels" / "numba_compile.py").read_bytes(), path.read_bytes()]
    return KEPT / hashlib.sha256(b"\0".join(texts)).hexdigest()[:32]


def copy_codes(source: Path, target: Path, pattern: str = "*") -> None:
    """The files of `source` that `target` has not, each whole; the code (.nbc) before the index that names it."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob(f"{pattern}.nb[ci]"), key=lambda file: file.suffix):
        if not (target / file.name).exists():
            partial = target / f"{file.name}.{os.getpid()}"
            shutil.copyfile(file, partial)
            partial.replace(target / file.name)


def note() -> None:
    """Writes that the sources as they are now need no compiling before tests run."""
    (CACHE / NOTE).write_text(json.dumps(state(sources())))


def load() -> None:
    """Loads all kernels into this process, so that its forks need not: 0.7 s."""
    for place in kernels(sources()):
        compile_kernel(place)


def main() -> None:
    """Compiles what is not compiled yet."""
    CACHE.mkdir(exist_ok=True)
    noted = CACHE / NOTE
    with noted.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = sources()
        if noted.exists() and json.loads(noted.read_text()) == state(files):
            return
        places = kernels(files)
        for path in files:
            copy_codes(kept(path), path.parent / "__pycache__")
        sys.stderr.write(f"{len(places)} kernels are compiled, once\n")
        with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
            pool.map(compile_kernel, places, chunksize=1)
        for path in files:
            copy_codes(path.parent / "__pycache__", kept(path), f"{path.stem}.*")
        note()


if __name__ == "__main__":
    main()
