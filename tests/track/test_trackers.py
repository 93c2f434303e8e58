"""Trackers see the numbers of the run log, without a network; one that is not installed is named with its extra."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import pytest

from espalier.recipe.errors import UserError
from espalier.track import trackers
from espalier.track.events import read
from espalier.track.run_tables import RunTables
from espalier.track.trackers import TensorBoard, scalars


class Library:
    """Stands for a tracker's package: remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, int]] = []
        self.ended = False
        self.started: dict[str, Any] = {}

    def is_tracking_uri_set(self) -> bool:
        return False

    def init(self, **options: Any) -> Library:
        self.started = options
        return self

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        step = int(values["step"]) if step is None else step
        self.told += [(name, value, step) for name, value in values.items() if name != "step"]

    def login(self, prompt: bool) -> bool:
        assert not prompt
        return False

    def finish(self) -> None:
        self.ended = True

    def MlflowClient(self, where: str) -> Library:
        assert where.startswith("sqlite:///")
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, run_name: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))

    def set_terminated(self, run: str) -> None:
        self.ended = True


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_numbers_are_those_of_the_log(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, name, library)  # type: ignore[arg-type]
    folder = made.make(tmp_path, 30)
    tracker = trackers.opened(name, folder)
    events = list(read(folder / "events.jsonl"))
    for event in events:
        tracker.event(event)
    tracker.close()
    wanted = [(key, value, event["step"]) for event in events for key, value in scalars(event)]
    assert wanted
    assert library.told == wanted
    assert library.ended
    assert name != "wandb" or library.started["mode"] == "offline"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_one_that_is_not_installed_or_does_not_start_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(UserError) as told:
        trackers.opened(name, tmp_path)
    assert f"espalier-train[{name}]" in str(told.value)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot start"):
        trackers.opened(name, tmp_path)


def test_wandb_writes_offline_where_nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = made.make(tmp_path, 3)
    tracker = trackers.opened("wandb", folder)
    for event in read(folder / "events.jsonl"):
        tracker.event(event)
    tracker.close()
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.filterwarnings("ignore")  # its own libraries' deprecations
def test_mlflow_keeps_the_curves_in_the_run_s_folder(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
    pytest.importorskip("sqlalchemy")
    folder = made.make(tmp_path, 3)
    tracker = trackers.opened("mlflow", folder)
    events = list(read(folder / "events.jsonl"))
    for event in events:
        tracker.event(event)
    tracker.close()
    client = mlflow.MlflowClient(f"sqlite:///{folder.absolute() / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("espalier").experiment_id])
    found = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert found == [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_the_curves_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", exc_type=ImportError)
    from trackio.sqlite_storage import SQLiteStorage

    folder = made.make(tmp_path, 3)
    tracker = trackers.opened("trackio", folder)
    events = list(read(folder / "events.jsonl"))
    for event in events:
        tracker.event(event)
    tracker.close()
    logs = SQLiteStorage.get_logs("espalier", folder.name)
    found = [(one["step"], one["train/loss"]) for one in logs if "train/loss" in one]
    assert found == [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


def test_scalars_equal_the_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    folder = made.make(tmp_path, 210)
    board = TensorBoard(folder / "tensorboard")
    for event in read(folder / "events.jsonl"):
        board.event(event)
    board.close()
    (file,) = (folder / "tensorboard").iterdir()
    seen: dict[str, list[tuple[int, float]]] = {}
    for record in EventFileLoader(str(file)).Load():
        for value in record.summary.value:
            number = value.simple_value or (value.tensor.float_val[0] if value.tensor.float_val else 0.0)
            seen.setdefault(value.tag, []).append((record.step, number))
    steps = RunTables.read(folder).steps
    assert [step for step, _ in seen["train/loss"]] == steps["step"].tolist()
    assert [loss for _, loss in seen["train/loss"]] == pytest.approx(steps["loss"].tolist(), rel=1e-6)
    assert len(seen["train/bytes/gradients"]) == 210
    assert [step for step, _ in seen["validation/bits_per_byte"]] == [200]


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"espalier-train\[track\]"):
        TensorBoard(tmp_path)
