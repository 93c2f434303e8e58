"""A run is taken up again on the data it was begun with, or says which file is not what it was."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from espalier.cli.resolve_recipe import resolve
from espalier.cli.start_run import open_inputs, start_run
from espalier.machine import cluster as clusters
from espalier.recipe import data_hash
from espalier.recipe.errors import UserError
from espalier.track import events
from espalier.train import run_folder as runs

MACHINE = clusters.loads('[[nodes]]\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\n')

THEIRS = """
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import Dataset, TensorDataset

HERE = Path(__file__).parent

class Lines(Dataset):
    def __init__(self):
        self.lines = [float(line) for line in (HERE / "lines.txt").read_text().split()]
    def __len__(self):
        return len(self.lines)
    def __getitem__(self, index):
        return torch.tensor([self.lines[index]])

def squares(model, batch):
    x = batch[0] if isinstance(batch, list) else batch
    return model(x).square().sum(), torch.tensor(len(x))

def tensors():
    values = [float(line) for line in (HERE / "lines.txt").read_text().split()]
    return nn.Linear(1, 1), TensorDataset(torch.tensor(values)[:, None]), squares

def lines():
    return nn.Linear(1, 1), Lines(), squares
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("numbers_of", None)
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text(f"document {number}: " + "the same words again. " * 400)
    (tmp_path / "edges.csv").write_text("\n".join(f"{i},{(i * 7 + 1) % 40}" for i in range(40)) + "\n")
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "edges.csv").write_text((tmp_path / "edges.csv").read_text())
    rows = "".join(f"{i},{('cat', 'dog')[i // 6 % 2]},{i / 40}\n" for i in range(40))
    (tmp_path / "graph" / "nodes.csv").write_text("id,label,size\n" + rows)
    rows = "".join(json.dumps({"text": f"row {i}: " + "words. " * 60}) + "\n" for i in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "numbers_of.py").write_text(THEIRS)
    (tmp_path / "lines.txt").write_text("\n".join(str(i) for i in range(40)))
    return tmp_path


RECIPES = {
    "language": '[model]\ndepth = 1\nwidth = 16\nheads = 2\n[data]\npath = "{home}/text"\nvalidation = 0.2\n'
    "[train]\nsteps = 2\nsequence = 16\nbatch_tokens = 32\n",
    "rows": '[model]\ndepth = 1\nwidth = 16\nheads = 2\n[data]\npath = "{home}/rows.jsonl"\nvalidation = 0.2\n'
    "[train]\nsteps = 2\nsequence = 16\nbatch_tokens = 32\n",
    "nodes": '[model]\nkind = "gcn"\n[data]\npath = "{home}/graph"\n[train]\nsteps = 2\n',
    "graph": '[model]\nkind = "gcn"\n[graph]\ntask = "link"\n[data]\npath = "{home}/edges.csv"\n[train]\nsteps = 2\n',
    "tensors": '[model]\nbuild = "numbers_of:tensors"\n[train]\nsteps = 2\nbatch_tokens = 4\n',
    "dataset": '[model]\nbuild = "numbers_of:lines"\n[train]\nsteps = 2\nbatch_tokens = 4\n',
}


def begin(home: Path, kind: str, *overrides: str) -> runs.RunFolder:
    """Begins the run, or takes it up again: as far as the plan."""
    file = home / "recipe.toml"
    file.write_text(RECIPES[kind].format(home=home) + "[plan]\ntrial = false\n")
    sys.modules.pop("numbers_of", None)
    given = open_inputs(resolve(file, list(overrides), run=str(home / "run")), str(home / "run"), True)
    job = start_run(given, lambda: MACHINE)
    job.folder.release()
    return job.folder


def one_of_many(home: Path) -> None:
    (home / "text" / "3.txt").write_text("other words. " * 700)


def half_deleted(home: Path) -> None:
    for number in range(4, 8):
        (home / "text" / f"{number}.txt").unlink()


def one_more(home: Path) -> None:
    (home / "text" / "extra.txt").write_text("more words. " * 400)


def renamed(home: Path) -> None:
    (home / "text" / "3.txt").rename(home / "text" / "three.txt")


def one_row_more(home: Path) -> None:
    with (home / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more. " * 40}) + "\n")


def labelled_anew(home: Path) -> None:
    nodes = home / "graph" / "nodes.csv"
    nodes.write_text(nodes.read_text().replace("7,cat", "7,dog"))


def replaced(home: Path) -> None:
    (home / "edges.csv").write_text("\n".join(f"{i},{(i * 3 + 2) % 40}" for i in range(40)) + "\n")


def one_number(home: Path) -> None:
    (home / "lines.txt").write_text("\n".join(str(i + (i == 17)) for i in range(40)))


CHANGES = [
    ("language", one_of_many, "text/3.txt has changed since"),
    ("language", half_deleted, r"text/4.txt has vanished \(and 3 more\) since"),
    ("language", one_more, "text/extra.txt is new since"),
    ("language", renamed, r"text/3.txt has vanished \(and 1 more\) since"),
    ("rows", one_row_more, "rows.jsonl has changed since"),
    ("nodes", labelled_anew, "graph/nodes.csv has changed since"),
    ("graph", replaced, "edges.csv has changed since"),
    ("tensors", one_number, "The dataset has changed since"),
    ("dataset", one_number, "The dataset has changed since"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        pytest.param(*one, id=f"{one[0]}-{one[1].__name__}", marks=pytest.mark.slow if number % 2 else ())
        for number, one in enumerate(CHANGES)
    ],
)
def test_changed_data_is_refused_by_name_and_accepted_on_demand(
    home: Path, kind: str, change: Callable[[Path], None], says: str
) -> None:
    begin(home, kind)
    begin(home, kind)
    change(home)
    with pytest.raises(UserError, match=says) as error:
        begin(home, kind)
    assert "faults.changed_data=accept" in str(error.value)
    folder = begin(home, kind, "faults.changed_data=accept")
    (logged,) = [event for event in events.read(folder.events) if event["event"] == "data"]
    assert says.replace("\\", "").split(" ")[0] in logged["changed"][0]
    begin(home, kind)  # from now on this is its data


def test_what_is_accepted_of_a_graph_is_mapped_or_refused_by_name(home: Path) -> None:
    begin(home, "nodes")
    nodes = home / "graph" / "nodes.csv"
    table = nodes.read_text()
    nodes.write_text(table.replace("dog", "bird"))
    with pytest.raises(UserError, match="has the class 'bird', which the run does not know"):
        begin(home, "nodes", "faults.changed_data=accept")
    nodes.write_text(table.replace("size", "weight"))
    with pytest.raises(UserError, match="'weight'"):
        begin(home, "nodes", "faults.changed_data=accept")
    nodes.unlink()
    with pytest.raises(UserError):
        begin(home, "nodes", "faults.changed_data=accept")


def test_a_file_that_was_only_touched_is_the_same(home: Path) -> None:
    begin(home, "language")
    os.utime(home / "text" / "3.txt", (1, 1))
    begin(home, "language")


def test_a_run_folder_without_hashes_is_accepted_with_a_note(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begin(home, "language")
    folder.data.unlink()
    one_of_many(home)
    given = open_inputs(resolve(home / "recipe.toml", []), str(home / "run"), False)
    start_run(given, lambda: MACHINE).folder.release()
    assert "has no data hashes" in capsys.readouterr().out
    assert folder.data.exists()


def test_an_unchanged_file_is_read_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = data_hash.below(home / "text")

    def never(path: Path, size: int) -> str:
        raise AssertionError(path)

    monkeypatch.setattr(data_hash, "_hash", never)
    assert data_hash.below(home / "text") == before


def test_of_a_large_file_ends_and_pieces_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_hash, "WHOLE", 1 << 10)
    monkeypatch.setattr(data_hash, "PIECE", 16)
    file = tmp_path / "large"
    data = bytearray(4096)
    seen = set()
    for place in (0, 4095, 132):  # the ends, and the second of 32 pieces
        changed = bytes(data[:place] + b"x" + data[place + 1 :])
        file.write_bytes(changed)
        seen.add(data_hash._hash(file, 4096))
    file.write_bytes(bytes(data))
    assert len({*seen, data_hash._hash(file, 4096)}) == 4
