"""TensorBoard sees the same numbers as the log."""

from __future__ import annotations

import sys
from pathlib import Path

import made
import pytest

from espalier.errors import UserError
from espalier.track.events import read
from espalier.track.run_tables import open_run
from espalier.track.tensorboard import TensorBoard


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
    steps = open_run(folder).steps
    assert [step for step, _ in seen["train/loss"]] == steps["step"].tolist()
    assert [loss for _, loss in seen["train/loss"]] == pytest.approx(steps["loss"].tolist(), rel=1e-6)
    assert len(seen["train/bytes/gradients"]) == 210
    assert [step for step, _ in seen["validation/bits_per_byte"]] == [200]


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(UserError, match=r"espalier\[track\]"):
        TensorBoard(tmp_path)
