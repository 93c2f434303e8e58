"""Readers of text and of tables beside plain loops over other libraries, and beside an earlier checkout.

    python bench/reading.py [--quick] [--pairs N] [--before FOLDER] [--json FILE]

Cases: one file of plain text, JSON lines with one text and two other columns, Parquet text in row groups, and a CSV of
edges. Each turn is a fresh process on one core; its seconds count from the first byte to the last, imports left out.
Peers: `plain loop` (open and decode; json.loads by line; pyarrow's iter_batches with to_pylist), `pyarrow.csv` (columns
only, no graph), and with `--before` the same reader of the checkout in FOLDER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from table import Row, arguments, compare, publish

ROOT = Path(__file__).parents[1]
WORDS = ["the", "of", "and", "a", "lattice", "tree", "frame", "grows", "on", "what", "there", "is", "slowly"]


# --- inputs ------------------------------------------------------------------------------------------------------


def text_of(generator: np.random.Generator, words: int) -> str:
    return " ".join(generator.choice(WORDS, words))


def write_inputs(folder: Path, megabytes: int, edges: int) -> dict[str, Path]:
    """One file for each case, the same for equal sizes."""
    import pyarrow as pa
    from pyarrow import parquet

    generator = np.random.default_rng(0)
    texts = [text_of(generator, 400) for _ in range(256)]
    count = megabytes * 2**20 // len(texts[0])
    rows = [texts[row % len(texts)] for row in range(count)]
    files = {
        "plain text": folder / "plain.txt",
        "JSON lines": folder / "rows.jsonl",
        "Parquet text": folder / "rows.parquet",
        "CSV of edges": folder / "edges.csv",
    }
    files["plain text"].write_text("\n".join(rows))
    with files["JSON lines"].open("w") as file:
        for number, row in enumerate(rows):
            file.write(json.dumps({"text": row, "url": f"row-{number}", "score": 0.5}) + "\n")
    table = pa.table({"text": rows, "url": [f"row-{number}" for number in range(count)]})
    parquet.write_table(table, files["Parquet text"], row_group_size=1024, use_dictionary=False)
    ends = generator.integers(0, max(2, edges // 10), (edges, 2))
    np.savetxt(files["CSV of edges"], ends, fmt="%d", delimiter=",", header="source,target", comments="")
    return files


# --- one turn, in a process of its own ---------------------------------------------------------------------------


def read_ours(case: str, file: str) -> None:
    from espalier.recipe import Data, GraphOptions

    if case == "CSV of edges":
        from espalier.graph.data import sources

        sources.load(Data(path=file), GraphOptions())
        return
    from espalier.language import text_sources

    for _ in text_sources.documents(Data(path=file)):
        pass


def read_plainly(case: str, file: str) -> None:
    if case == "plain text":
        Path(file).read_bytes().decode()
    elif case == "JSON lines":
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                json.loads(line)["text"].encode()
    elif case == "Parquet text":
        from pyarrow import parquet

        for batch in parquet.ParquetFile(file).iter_batches(columns=["text"]):
            for row in batch.to_pylist():
                row["text"].encode()
    else:
        from pyarrow import csv

        table = csv.read_csv(file, csv.ReadOptions(use_threads=False))
        [table[name].to_numpy() for name in table.column_names]


def turn(reader: str, case: str, file: str) -> None:
    """Prints the seconds of one reading; the libraries are imported by reading a small file first."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    read: Callable[[str, str], None] = read_plainly if reader == "plain" else read_ours
    small = str(Path(file).with_name("small")) + Path(file).suffix
    read(case, small)
    begin = time.perf_counter()
    read(case, file)
    print(time.perf_counter() - begin)


def seconds(source: Path, reader: str, case: str, file: Path) -> float:
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "turn", reader, case, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    return float(done.stdout.split()[-1])


def measure(case: str, file: Path, before: Path | None, pairs: int) -> list[Row]:
    """Ours beside each peer; all take turns. Parquet counts by the text in it, as it is compressed."""
    plain = file.with_name("plain.txt")
    amount = (plain if case == "Parquet text" else file).stat().st_size / 2**20
    peers = {"pyarrow.csv" if case == "CSV of edges" else "plain loop": (ROOT / "src", "plain")}
    if before is not None and case != "Parquet text":
        peers["before"] = (before / "src", "ours")
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for _ in range(pairs):
        for name, (source, reader) in peers.items():
            ours = amount / seconds(ROOT / "src", "ours", case, file)
            turns[name].append((ours, amount / seconds(source, reader, case, file)))
    label = f"{case}, {amount:.0f} MiB"
    return [compare(label, name, "MiB/s", each) for name, each in turns.items()]


def main() -> None:
    options = arguments(__doc__ or "", before={"metavar": "FOLDER", "help": "an earlier checkout"})
    megabytes, edges = (16, 500_000) if options.quick else (100, 5_000_000)
    pairs = options.pairs or (3 if options.quick else 7)
    before = Path(options.before).absolute() if options.before else None
    with tempfile.TemporaryDirectory() as folder:
        files = write_inputs(Path(folder), megabytes, edges)
        small = Path(folder) / "few"
        small.mkdir()
        for case, file in write_inputs(small, 1, 100).items():
            file.rename(files[case].with_name("small" + file.suffix))
        rows = [row for case, file in files.items() for row in measure(case, file, before, pairs)]
    publish(rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["turn"]:
        turn(*sys.argv[2:5])
    else:
        main()
