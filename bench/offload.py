"""Optimizer states on disk and in memory, beside plain PyTorch, mapped files, and DeepSpeed's ZeRO-3 with offload.

    python bench/offload.py --quick
    python bench/offload.py --deepspeed VENV/bin/python --json docs/measured/offload.json

The decoder has the shape of SmolLM2-135M (random weights and tokens; `--quick`: 4 of its 30 layers), in fp32; all run
the same loop in one process. Memory is the most anonymous and shared pages that a process held. DeepSpeed runs in an
environment of its own (`pip install deepspeed==0.19.8`, and libaio-dev for nvme); without, its rows are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from table import Row, arguments, interval, publish, save

HERE = Path(__file__).parent
SMOLLM2 = {
    "width": 576, "vocabulary": 49152, "heads": 9, "kv_heads": 3, "feed_forward": 1536, "depth": 30, "tied": True,
}  # fmt: skip
"""HuggingFaceTB/SmolLM2-135M, config.json."""
PEERS = {
    "resident": "states in memory",
    "by hand": "states in mapped files",
    "deepspeed cpu": "DeepSpeed 0.19.8 ZeRO-3, optimizer on cpu",
    "deepspeed nvme": "DeepSpeed 0.19.8 ZeRO-3, optimizer on nvme",
}


BESIDE = {
    "resident": ["on disk", "half on disk"], "by hand": ["on disk"],
    "deepspeed cpu": ["in memory", "half on disk", "on disk"], "deepspeed nvme": ["on disk"],
}  # fmt: skip
"""Where ours has its states."""


class Found(NamedTuple):
    """Of one run: median seconds of a step after the first, the most bytes held, and the losses."""

    seconds: float
    memory: float
    losses: list[float]


def run(contestant: str, request: dict[str, Any], python: str) -> Found:
    """Runs one contestant in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="bench-offload-", dir=request["place"]))
    try:
        path = folder / "request.json"
        path.write_text(json.dumps({**request, "contestant": contestant, "folder": str(folder)}))
        command = [python, str(HERE / "offload_rank.py"), str(path)]
        extensions = (
            Path(tempfile.gettempdir()) / "bench-offload-extensions"
        )  # what DeepSpeed compiles at its first run
        for lock in extensions.glob("**/lock"):
            lock.unlink()  # of a run that was ended while it compiled; the next would wait for ever
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(request["threads"]),
            "TORCH_EXTENSIONS_DIR": str(extensions),
        }
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            try:
                most = _watch(process, request["limit"])
            finally:
                process.kill()
                process.wait()
        if process.returncode:
            raise RuntimeError(f"{contestant}: {(folder / 'err').read_text()[-1500:]}")
        told = json.loads((folder / "out").read_text().splitlines()[-1])
        return Found(statistics.median(told["seconds"][1:]), most, told["losses"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], limit: float) -> float:
    """The most anonymous and shared bytes that the process held; TimeoutError after `limit` seconds."""
    most, begun = 0, time.monotonic()
    while process.poll() is None:
        if time.monotonic() - begun > limit:
            raise TimeoutError(f"not done in {limit:g} s")
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except FileNotFoundError:
            break
        held = sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
        most = max(most, held * 1024)
        time.sleep(0.02)
    process.wait()
    return float(most)


def rows(peer: str, pairs: list[tuple[Found, Found]], tokens: int, case: str) -> list[Row]:
    """Speed and memory of (peer, ours) pairs."""
    found = []
    for unit, of, better in (("tokens/s", _speed(tokens), 1), ("MiB", _memory, -1)):
        theirs, ours = [of(one) for one, _ in pairs], [of(one) for _, one in pairs]
        ratios = [(b / a) ** better for a, b in zip(theirs, ours, strict=True)]
        low, high = interval(ratios)
        medians = statistics.median(theirs), statistics.median(ours), statistics.median(ratios)
        found.append(Row(case, PEERS[peer], *medians, unit, f"{low:.2f} to {high:.2f}, n = {len(pairs)}"))
    return found


def _speed(tokens: int) -> Any:
    return lambda one: tokens / one.seconds


def _memory(one: Found) -> float:
    return one.memory / 2**20


def main() -> None:
    """Runs all, in turn."""
    given = arguments(
        __doc__.splitlines()[0],
        deepspeed={"metavar": "PYTHON", "help": "an interpreter that has DeepSpeed"},
        place={"metavar": "FOLDER", "help": "on the disk to use (default: the folder for temporary files)"},
        peers={"metavar": "NAME", "nargs": "*", "default": list(PEERS), "help": "which: " + ", ".join(PEERS)},
    )
    sizes = {**SMOLLM2, "sequence": 64 if given.quick else 128, **({"depth": 4} if given.quick else {})}
    request = {
        "sizes": sizes, "steps": 3, "batch": 8, "micro_batch": 4, "threads": 2, "port": 29511,
        "place": given.place, "limit": 300.0,
    }  # fmt: skip
    tokens = request["batch"] * sizes["sequence"]
    case = f"SmolLM2-135M's shape, {sizes['depth']} layers, {tokens:,} tokens a step" + ", quick" * given.quick
    pythons = {one: given.deepspeed if one.startswith("deepspeed") else sys.executable for one in given.peers}
    for peer in [one for one, python in pythons.items() if python is None]:
        print(f"{PEERS[peer]}: left out, as --deepspeed names no interpreter")
        del pythons[peer]
    turns: list[dict[str, Found]] = []
    made: list[Row] = []
    for _ in range(given.pairs or (1 if given.quick else 3)):
        turns.append({})
        ours = {f"ours {where}": sys.executable for peer in pythons for where in BESIDE[peer]}
        for name, python in {**pythons, **ours}.items():
            found = turns[-1][name] = run(name, request, python)
            print(f"{name}: {found.seconds:.2f} s a step, {found.memory / 2**20:,.0f} MiB, loss {found.losses[-1]:.6f}")
        made = []
        for peer in pythons:
            for where in BESIDE[peer]:
                pairs = [(turn[peer], turn[f"ours {where}"]) for turn in turns]
                made += rows(peer, pairs, tokens, f"{case}, states {where}")
        if given.json:  # of a run that is cut short
            save(made, given.json)
    publish(made, given.json)


if __name__ == "__main__":
    main()
