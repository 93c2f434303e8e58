"""What the planner answers to the questions of `questions.py`, stored in `plans.json.xz`.

    python tests/golden/golden_plans.py --compare [GROUP ...]     prints every difference, exit code 1 if there is one
    python tests/golden/golden_plans.py --write                   stores the answers of today

A group is an example's name, `advice` or `drawn`. A commit that changes answers says why each has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from questions import ROOT, questions, scenery

STORED = Path(__file__).with_name("plans.json.xz")
AGAIN = "To store them anew: python tests/golden/golden_plans.py --write"
SAME_EVERYWHERE = {
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",  # sums and sorts depend on vector instructions
    "CUDA_VISIBLE_DEVICES": "",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
}
ABSENT = ("pymetis",)
"""Optional libraries that answers would depend on."""

Answer = dict[str, Any]


def stored() -> dict[str, Answer]:
    """The answers in the file, by question."""
    answers: dict[str, Answer] = json.loads(lzma.decompress(STORED.read_bytes()))
    return answers


def packed(answers: Mapping[str, Answer]) -> bytes:
    """The file's content: equal answers give equal bytes."""
    return lzma.compress(canonical(dict(sorted(answers.items()))).encode(), preset=9 | lzma.PRESET_EXTREME)


def canonical(value: Any) -> str:
    """JSON without spaces; keys stand as the planner has them."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=True)


def group(name: str) -> str:
    """Which group a question belongs to."""
    return name.partition(":")[0]


# --- answers -----------------------------------------------------------------------------------------------------


def answers(names: Iterable[str], processes: int = 1) -> dict[str, Answer]:
    """What the planner answers today, from child processes that are set up alike on every machine."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group(name), []).append(name)
    by_size = sorted(groups.values(), key=len)
    shares = [[name for members in by_size[at::processes] for name in members] for at in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        return {name: answer for share in pool.map(_in_child, shares) for name, answer in share.items()}


def _in_child(names: list[str]) -> dict[str, Answer]:
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            [sys.executable, str(Path(__file__).absolute()), "--answer"],
            input=json.dumps(names),
            env={**os.environ, **SAME_EVERYWHERE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if child.returncode:
        raise RuntimeError(f"The planner ended with exit code {child.returncode}:\n{child.stderr}")
    answered: dict[str, Answer] = json.loads(child.stdout)
    return answered


def _answer_here() -> None:
    """Answers the questions on standard input, in the current folder."""
    installed = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in ABSENT else installed(name, package)

    importlib.util.find_spec = find_spec
    from espalier.cli.main import main

    scenery(Path.cwd())
    asked = questions()
    answered = {name: _answer(main, asked[name].words) for name in json.load(sys.stdin)}
    sys.stdout.write(json.dumps(answered))


def _answer(main: Callable[[list[str]], int], words: list[str]) -> Answer:
    """Exit code or crash, standard output (JSON where it is), and the refusal on standard error, without progress."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except Exception as error:
            return {"crash": f"{type(error).__name__}: {error}"}
    printed = _without_places(out.getvalue())
    _, mark, refusal = _without_places(err.getvalue()).partition("espalier: ")
    answer: Answer = {"code": code}
    answer["out"] = json.loads(printed) if "--json" in words else printed.splitlines()
    if mark:
        answer["refusal"] = refusal.splitlines()
    return answer


def _without_places(text: str) -> str:
    """`text` with words for the current folder and the cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return text.replace(str(Path.cwd()), "FOLDER").replace(cache, "CACHE")


# --- differences -------------------------------------------------------------------------------------------------


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Each place where two answers differ, as `path: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (*old, *(key for key in new if key not in old)):
            place = f"{path}.{key}" if path else key
            if key not in new:
                yield f"{place}: {canonical(old[key])} -> (nothing)"
            elif key not in old:
                yield f"{place}: (nothing) -> {canonical(new[key])}"
            else:
                yield from differences(old[key], new[key], place)
        if list(old) != list(new) and set(old) == set(new):
            yield f"{path}: keys in another order: {', '.join(old)} -> {', '.join(new)}"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{path}[{at}]")
    elif canonical(old) != canonical(new):
        yield f"{path}: {canonical(old)} -> {canonical(new)}"


def first_differences(old: Mapping[str, Answer], new: Mapping[str, Answer]) -> list[str]:
    """Of each question of `new` whose answer differs, the first place."""
    changed = [name for name in new if canonical(old.get(name)) != canonical(new[name])]
    return [f"{name}\n  {next(differences(old.get(name, {}), new[name]))}" for name in changed]


# --- command line ------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Compares or writes. Returns the exit code."""
    names = [name for name in questions() if not arguments.groups or group(name) in arguments.groups]
    begin = time.monotonic()
    fresh = answers(names, arguments.processes)
    seconds = time.monotonic() - begin
    refused = sum(answer.get("code") != 0 for answer in fresh.values())
    sys.stdout.write(f"{len(fresh)} questions, {refused} refused, {seconds:.0f} s\n")
    if arguments.write:
        content = packed((stored() if arguments.groups else {}) | fresh)
        STORED.write_bytes(content)
        sys.stdout.write(f"{STORED.relative_to(ROOT)}: {len(content):,} bytes\n")
        return 0
    known = stored()
    changed = [name for name in fresh if canonical(known.get(name)) != canonical(fresh[name])]
    for name in changed:
        sys.stdout.write(f"{name}\n")
        sys.stdout.writelines(f"  {line}\n" for line in differences(known.get(name, {}), fresh[name]))
    sys.stdout.write(f"{len(changed)} answers differ\n")
    return 1 if changed else 0


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help="only these groups")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    way = parser.add_mutually_exclusive_group(required=True)
    for name in ("compare", "write", "answer"):
        way.add_argument(f"--{name}", action="store_true")
    arguments = parser.parse_args()
    if arguments.answer:
        _answer_here()
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
