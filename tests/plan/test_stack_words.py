"""What a measured row says of the stack that ran it reaches the request; unknown words are refused with the nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rows import HEAD, LINE, changed, lines, table

from espalier.plan.calibration import Batch, Measurement
from espalier.plan.calibration_factors import PLAIN
from espalier.plan.measurements.stack_words import WHOLE
from espalier.plan.measurements.table import read
from espalier.recipe.errors import UserError


def one(folder: Path, **tables: dict[str, Any]) -> Measurement:
    return read(lines(folder, changed(**tables))).rows[0].measurement


def test_an_executor_brings_its_habits_and_a_word_overrules_them(tmp_path: Path) -> None:
    found = one(tmp_path, train={"executor": "Megatron"}).request
    assert (found.system.overlap, found.recipe.comm.bucket, found.system.temporaries) == (False, f"{WHOLE}B", 0.0)
    assert found.system.storage is not None
    assert found.system.storage.grads == 4
    said = one(tmp_path, train={"executor": "megatron-lm", "overlap": True, "bucket": "64MiB", "gradients": "bf16"})
    assert said.stack == "megatron-lm on A100-80GB"
    assert (said.request.system.overlap, said.request.recipe.comm.bucket) == (True, f"{64 * 2**20}B")
    assert said.request.system.storage is not None
    assert said.request.system.storage.grads == 2


@pytest.mark.parametrize(
    ("word", "value", "hint"),
    [("attention", "flsh", "flash"), ("executor", "megatorn-lm", "megatron-lm"), ("update", "fussed", "fused"),
     ("bucket", True, "25MiB"), ("overlap", "yes", "true or false"), ("loss", "chunkd", "chunked")],
)  # fmt: skip
def test_an_unknown_word_is_refused_with_the_nearest(tmp_path: Path, word: str, value: Any, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        one(tmp_path, train={word: value})


def test_context_and_interleaved_ranks_are_said_as_others_say_them(tmp_path: Path) -> None:
    found = one(tmp_path, layout={"dp": 2, "tp": 2, "cp": 2, "pp": 2, "vp": 3, "accumulate": ...}).layout
    assert (found.cp, found.hp, found.chunks, int(found.world)) == (2, 1, 3, 16)


def test_allocated_bytes_are_fewer_than_the_device_s(tmp_path: Path) -> None:
    kinds = ("allocated", "max_reserved", "nvidia-smi")
    peaks = [float(Batch([one(tmp_path, measured={"memory": kind})]).predict(PLAIN)[1][0]) for kind in kinds]
    assert peaks[0] < peaks[1] < peaks[2]


def test_a_csv_says_the_same_in_columns(tmp_path: Path) -> None:
    path = table(tmp_path, f"{LINE},H100,bf16,nemo,3,4", head=f"{HEAD},device,precision,executor,vp,kv_heads")
    found = read(path).rows[0].measurement
    assert (found.request.precision, found.layout.chunks, found.request.profile.kv_heads) == ("bf16", 3, 4)
    assert found.stack == "nemo on H100"
    assert found.request.system.overlap
