"""Diagnosis of logs: how often right, beside the name of the first exception; how fast, beside grep; how small.

    python bench/diagnose.py [--quick] [--pairs N] [--json FILE] [--data FOLDER] [--only accuracy,compression,speed]

Accuracy on three labelled sets, each apart: the shared one (`failure-logs` in the folder of measured tables), by
others, and three of our own in tests/ops. `first exception` calls a log by the first name in it that ends in
Error, its line the root, the reason's usual action the action. "Not stopped wrongly" is the share of logs that are not
stopped where a restart can help.

Speed: a log of routine lines with warnings every 50, read whole; ours is the whole diagnosis, grep only counts lines
that hold one of the same words. And logs of random words, which no two lines share: quiet ones, ones of which every
second line holds an alarming word, and ones with very long lines; there also the scan alone, which is the first pass
over the bytes. Compression: lines over lines kept, and whether the root line of every labelled log is
kept, among the lines or among the losses, when the log stands amid 50 000 routine lines.
"""

from __future__ import annotations

import csv
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from espalier.ops.diagnosis import diagnose
from espalier.ops.log_scan import keywords, scan
from espalier.ops.taxonomy import NO_FAILURE, REASONS, Diagnosis
from table import Row, arguments, compare, interval, publish

ROOT = Path(__file__).parent.parent
OWN = ROOT / "tests" / "ops"
NEAR = 2
"""Lines by which a root line may be off."""
NAMES = {reason.replace(" ", ""): reason for reason in REASONS if reason.endswith("Error")}
NAMES |= {"ModuleNotFoundError": "Import Error", "OutOfMemoryError": "Out of Memory Error", "IOError": "OS Error"}
NAMES |= {
    "AcceleratorError": "CUDA Error",
    "DistBackendError": "NCCL Remote Error",
    "ncclRemoteError": "NCCL Remote Error",
}
NAMES |= {
    "ClientError": "S3 Storage Error",
    "EndpointConnectionError": "S3 Storage Error",
    "SafetensorError": "Model Loading Error",
}
NAMES |= {
    "DistStoreError": "Connection Error",
    "DistNetworkError": "Connection Error",
    "MaxRetryError": "Connection Error",
}
NAMES |= {"DatasetNotFoundError": "Dataset Loading Error", "DatasetGenerationError": "Dataset Loading Error"}
NAMES |= {
    "ConnectionRefusedError": "Connection Error",
    "ConnectionResetError": "Connection Error",
    "UnboundLocalError": "Name Error",
}
NAMES |= {"IndentationError": "Syntax Error", "XlaRuntimeError": "Runtime Error"}
"""What a person who knows the libraries would call an exception by its name alone."""
_ERROR = re.compile(r"\b(\w*Error)\b")


@dataclass(frozen=True)
class Labelled:
    """A log and what it is: reason, root line (None: nothing failed), action."""

    path: Path
    reason: str
    root: int | None
    action: str


def shared(folder: Path) -> Iterator[Labelled]:
    """The set that others wrote."""
    with (folder / "labels.csv").open() as file:
        for row in csv.DictReader(file):
            yield Labelled(folder / row["file"], row["reason"], int(row["root_line"] or 0) or None, row["action"])


def own(file: Path, folder: Path) -> Iterator[Labelled]:
    """One of our sets, its logs written to `folder`."""
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))["log"]:
        path = folder / f"{entry['name']}.log"
        path.write_text(entry["text"], encoding="utf-8")
        lines = entry["text"].splitlines()
        root = next((at for at, line in enumerate(lines, 1) if entry["root"] and entry["root"] in line), None)
        yield Labelled(path, entry["reason"], root, entry["action"])


def first_exception(path: Path) -> Diagnosis:
    """The baseline: the first name that ends in Error."""
    for number, line in enumerate(path.read_text(errors="replace").split("\n"), 1):
        for name in _ERROR.findall(line):
            reason = NAMES.get(name)
            if reason is not None:
                kind = REASONS[reason]
                return Diagnosis(str(path), kind.category, reason, number, None, None, kind.action)
    kind = REASONS[NO_FAILURE]
    return Diagnosis(str(path), kind.category, NO_FAILURE, None, None, None, kind.action)


def scores(logs: Sequence[Labelled], found: Sequence[Diagnosis]) -> dict[str, float]:
    """Shares of logs whose reason, category, root line are right, and that are not stopped wrongly."""
    both = list(zip(logs, found, strict=True))
    rooted = [(log, one) for log, one in both if log.root is not None]
    restartable = [one for log, one in both if log.action != "stop"]
    return {
        "reason": sum(log.reason == one.reason for log, one in both) / len(both),
        "category": sum(REASONS[log.reason].category == one.category for log, one in both) / len(both),
        "root line": sum(abs((one.root_line or -9) - (log.root or 0)) <= NEAR for log, one in rooted) / len(rooted),
        "action": sum(log.action == one.action for log, one in both) / len(both),
        "not stopped wrongly": sum(one.action != "stop" for one in restartable) / len(restartable),
    }


def accuracy(name: str, logs: Sequence[Labelled]) -> list[Row]:
    """Ours beside the baseline on one set."""
    mine = scores(logs, [diagnose(log.path)[0] for log in logs])
    theirs = scores(logs, [first_exception(log.path) for log in logs])
    return [
        Row(f"{name} ({len(logs)} logs), {what}", "first exception", theirs[what], mine[what],
            mine[what] / theirs[what] if theirs[what] else float(len(logs)), "share", f"n={len(logs)}")
        for what in mine
    ]  # fmt: skip


def routine(lines: int, seed: int = 0) -> bytes:
    """Lines of a healthy job: steps of 8 ranks, a warning every 50, a checkpoint every 500."""
    draw = random.Random(seed)
    made = []
    for step in range(lines):
        clock = f"2024-05-0{step % 9 + 1} 12:{step // 60 % 60:02d}:{step % 60:02d},{step % 1000:03d}"
        loss, took = 2 + draw.random() / 5, 800 + 90 * draw.random()
        made.append(
            f"[default{step % 8}]:[{clock}] [INFO] [train.py:412] iteration {step:8d}/ 500000 | "
            f"consumed samples: {step * 8} | "
            f"elapsed time per iteration (ms): {took:.1f} | learning rate: 1.2E-04 | lm loss: {loss:.6E} | "
            f"grad norm: {draw.random():.3f} | number of skipped iterations: 0 | number of nan iterations: 0 |"
        )
        if step % 50 == 0:
            made.append(
                f"[W{step % 1000:03d}] UserWarning: the error of timer {step} was {draw.random():.3f} ms, retrying"
            )
        if step % 500 == 0:
            made.append(f"saved checkpoint /ckpt/step_{step} in {draw.random():.2f} s, 0 failed")
    return ("\n".join(made) + "\n").encode()


FAULT = b"Traceback (most recent call last):\n  File \"train.py\", line 3, in f\nKeyError: 'k'\n"


def babble(size: int, words_of_line: int, alarm: int, seed: int = 0) -> bytes:
    """Lines of words of random letters; every `alarm`th line ends in one of the words that could matter."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(5000)]
    made: list[str] = []
    while size > 0:
        line = " ".join(draw.choices(known, k=words_of_line))
        if alarm and len(made) % alarm == 0:
            line += f" {draw.choice(keywords.WORDS).decode()}"
        made.append(line)
        size -= len(line) + 1
    return ("\n".join(made) + "\n").encode()


BABBLE = {
    "random words": (18, 0),
    "random words, every 2nd line alarming": (18, 2),
    "lines of 20 000 words": (20_000, 0),
}
"""Words of a line, and which line is alarming."""


def speed(folder: Path, size: int, pairs: int) -> list[Row]:
    """MB/s of the whole diagnosis beside grep's, and seconds for the whole file; of random text also of the scan."""
    path = folder / "large.log"
    block = routine(60_000)
    with path.open("wb") as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        file.write(FAULT)
    whole = f"log of {path.stat().st_size / 1e9:.2g} GB, whole diagnosis"
    times = _times(path, lambda path: diagnose(path)[0].reason == "Key Error", pairs)
    rows = [
        _rate(whole, path, times),
        compare(whole, "grep -ciE", "s", times, higher_is_better=False),
    ]
    for name, (count, alarm) in BABBLE.items():
        path.write_bytes(babble(size // 10, count, alarm) + FAULT)
        case = f"{name}, {path.stat().st_size / 1e6:.0f} MB"
        rows.append(_rate(f"{case}, scan", path, _times(path, _kept, pairs)))
        rows.append(_rate(f"{case}, whole diagnosis", path, _times(path, lambda path: bool(diagnose(path)), pairs)))
    return rows


def _kept(path: Path) -> bool:
    """Whether the scan keeps the fault's line."""
    return "KeyError: 'k'" in scan.scan(path).lines.values()


def _times(path: Path, ours: Callable[[Path], bool], pairs: int) -> list[tuple[float, float]]:
    """Seconds of ours, which must be true, and of grep."""
    pattern = "|".join(word.decode() for word in keywords.WORDS)
    command = ["grep", "-a", "-c", "-i", "-E", pattern, str(path)]
    times = []
    for _ in range(pairs):
        begin = time.perf_counter()
        assert ours(path), path
        middle = time.perf_counter()
        subprocess.run(command, capture_output=True, env={**os.environ, "LC_ALL": "C"}, check=False)
        times.append((middle - begin, time.perf_counter() - middle))
    return times


def _rate(case: str, path: Path, times: Sequence[tuple[float, float]]) -> Row:
    size = path.stat().st_size / 1e6
    return compare(case, "grep -ciE", "MB/s", [(size / mine, size / theirs) for mine, theirs in times])


def compressed(folder: Path, logs: Sequence[Labelled]) -> list[Row]:
    """Lines over lines kept of each labelled log amid routine lines, and the share of root lines that are kept."""
    before, after = routine(40_000), routine(10_000, seed=1)
    around = before.count(b"\n")
    pattern = re.compile("|".join(word.decode() for word in keywords.WORDS), re.I)
    plain = sum(pattern.search(line) is not None for line in (before + after).decode().split("\n"))
    ratios, kept, theirs = [], [], []
    for log in logs:
        text = log.path.read_bytes()
        path = folder / "amid.log"
        path.write_bytes(before + text.rstrip(b"\n") + b"\n" + after)
        scanned = scan.scan(path)
        ratios.append(scanned.total / max(1, len(scanned.lines)))
        theirs.append(scanned.total / (plain + text.count(b"\n")))
        if log.root is not None:
            kept.append(around + log.root in scanned.lines.keys() | {loss.number for loss in scanned.losses})
    low, high = interval(ratios)
    ours, peer = sorted(ratios)[len(ratios) // 2], sorted(theirs)[len(theirs) // 2]
    spread = f"{low:.0f}-{high:.0f} (n={len(ratios)})"
    name, share = f"{len(logs)} logs amid 50 000 routine lines", sum(kept) / len(kept)
    return [
        Row(f"{name}, lines over lines kept", "grep -iE", peer, ours, ours / peer, "x", spread),
        Row(f"{name}, root lines kept", "all lines", 1.0, share, share, "share", f"n={len(kept)}"),
    ]


def main() -> None:
    data = {"metavar": "FOLDER", "default": str(ROOT.parent / "shared" / "data"), "help": "measured tables"}
    only = {"default": "accuracy,compression,speed", "help": "parts"}
    asked = arguments((__doc__ or "").splitlines()[0], data=data, only=only)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        sets = {}
        if (Path(asked.data) / "failure-logs").is_dir():
            sets["shared set"] = list(shared(Path(asked.data) / "failure-logs"))
        both = [log for name in ("infrastructure", "software") for log in own(OWN / f"logs-{name}.toml", folder)]
        sets["own set"] = both
        sets["tricky set"] = list(own(OWN / "logs-tricky.toml", folder))
        sets["advice set"] = list(own(OWN / "logs-advice.toml", folder))
        if "accuracy" in asked.only:
            rows += [row for name, logs in sets.items() for row in accuracy(name, logs)]
        if "compression" in asked.only:
            rows += compressed(folder, [log for logs in sets.values() for log in logs])
        if "speed" in asked.only:
            rows += speed(folder, 10**8 if asked.quick else 10**9, asked.pairs or (3 if asked.quick else 5))
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
