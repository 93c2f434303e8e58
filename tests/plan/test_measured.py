"""Files of measurements: what is absent is derived, what is wrong is named with its line, nothing else is raised."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import HEAD, LINE, ROW, changed, lines, table

from espalier.plan.calibration import Batch, Measurement
from espalier.plan.calibration_factors import PLAIN
from espalier.plan.layouts import Layouts
from espalier.plan.measurements.table import read
from espalier.recipe.errors import UserError


def one(folder: Path, row: Any) -> Measurement:
    return read(lines(folder, row)).rows[0].measurement


def layout(folder: Path, train: dict[str, Any] | None = None, **words: Any) -> Layouts:
    """What a layout's words mean on the 16 GPUs of ROW."""
    return one(folder, {**changed(train=train or {}), "layout": words}).layout


# --- CSV ---------------------------------------------------------------------------------------------------------


def test_a_csv_row_is_a_gpt_with_every_block_recomputed(tmp_path: Path) -> None:
    found = read(table(tmp_path, "# a comment", "", LINE)).rows[0]
    row, request = found.measurement, found.measurement.request
    assert (row.layout.dp, row.layout.tp, row.layout.pp, row.layout.micro_batch) == (2, 2, 2, 2)
    assert (row.layout.algorithm, row.layout.recompute) == ("megatron", "block")
    assert row.step_seconds == pytest.approx(0.9005)
    assert request.profile.parameters == pytest.approx(24 * 12 * 2048**2 + 51200 * 2048, rel=1e-3)
    assert (request.profile.global_batch, request.profile.tokens_per_sample, request.system.sequence_parallel) == (
        32,
        1024.0,
        False,
    )
    assert found.line == 4


def test_a_thousand_gpus_stand_in_machines_of_eight(tmp_path: Path) -> None:
    found = read(table(tmp_path, "1024,2048,1,2048,16,24,1024,8,128,1,900", "4,8,1,2048,16,24,1024,4,1,1,900"))
    large, small = (row.measurement.cluster for row in found.rows)
    assert (large.machines, len(large.devices())) == (128, 1024)
    assert (small.machines, len(small.devices())) == (1, 4)


def test_rows_of_one_model_and_batch_share_request_cluster_and_group(tmp_path: Path) -> None:
    other = LINE.replace(",1024,2,2,2", ",1024,4,2,1")
    same, also, more = read(table(tmp_path, LINE, other, LINE.replace("8,32", "8,64"))).rows
    assert same.measurement.request is also.measurement.request
    assert same.measurement.cluster is also.measurement.cluster
    assert same.group == also.group != more.group


def test_more_columns_are_kept_and_a_time_may_be_absent(tmp_path: Path) -> None:
    found = read(table(tmp_path, f'{LINE},"a, b"', head=f"{HEAD},note"))
    assert found.rows[0].given["note"] == "a, b"
    bare = read(table(tmp_path, LINE.rpartition(",")[0], head=HEAD.rpartition(",")[0]))
    assert bare.rows[0].measurement.step_seconds is None
    assert read(table(tmp_path, LINE.rpartition(",")[0] + ",")).rows[0].measurement.step_seconds is None


CSV = {
    "no column 'global_batch'": (HEAD.replace("global_batch", "global_batches"), LINE, "rename 'global_batches'"),
    "no column 'gpus'": (HEAD.replace(",", ";"), LINE.replace(",", ";"), "commas"),
    "holds numbers": (LINE, LINE, "first line"),
    "comes twice": (f"{HEAD},seq", f"{LINE},1", "name of its own"),
    "10 values for 11 columns": (HEAD, LINE.rpartition(",")[0], "line 2"),
    "tp x dp x pp": (HEAD, LINE.replace("8,32", "16,32"), "gpus = 8"),
    "unknown key column.head_sise": (f"{HEAD},head_sise", f"{LINE},64", "column.head_size"),
    "layers = 'x'": (HEAD, LINE.replace(",24,", ",x,"), "whole number"),
    "is not a time": (HEAD, LINE.replace("900.5", "-1"), "milliseconds"),
    "micro_batch = '0'": (HEAD, LINE.replace(",2,2048", ",0,2048"), "1 or more"),
    "no rows": (HEAD, "", "one row per"),
}


@pytest.mark.parametrize("wrong", CSV)
def test_a_wrong_csv_is_refused_by_name(tmp_path: Path, wrong: str) -> None:
    head, line, hint = CSV[wrong]
    with pytest.raises(UserError) as error:
        read(table(tmp_path, line, head=head))
    assert wrong in str(error.value)
    assert hint in str(error.value)
    assert str(tmp_path / "rows.csv") in str(error.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n# nothing\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "array").write_text("[1]")
    for name in ("empty", "bytes", "array", "missing", "."):
        with pytest.raises(UserError):
            read(tmp_path / name)


# --- JSON lines --------------------------------------------------------------------------------------------------


def test_both_forms_mean_the_same_run(tmp_path: Path) -> None:
    """Where nothing is split by tensor and nothing reduced, the two forms' assumptions about both do not matter."""
    row = changed(
        model={"fused": False},
        cluster={"nodes": [{"device": "A100-80GB", "devices": 2}]},
        layout={"dp": 1, "pp": 2, "accumulate": ..., "micro_batch": 2},
        train={"executor": "megatron-lm", "gradients": "fp16"},
    )
    csv = read(table(tmp_path, "2,32,2,2048,16,24,1024,1,1,2,900")).measurements
    left, right = (Batch(rows).predict(PLAIN)[0] for rows in (csv, [one(tmp_path, row)]))
    assert left == pytest.approx(right, rel=1e-9)


def test_what_is_measured_is_read(tmp_path: Path) -> None:
    found = one(tmp_path, ROW)
    assert (found.step_seconds, found.peak_bytes, found.out_of_memory) == (1.0, 40 * 2**30, False)
    ended = {"step_seconds": None, "peak_gib": None, "out_of_memory": True}
    out = one(tmp_path, {**ROW, "measured": ended})
    assert (out.step_seconds, out.peak_bytes, out.out_of_memory) == (None, None, True)
    asked = one(tmp_path, {name: ROW[name] for name in ROW if name != "measured"})
    assert (asked.step_seconds, asked.out_of_memory) == (None, None)


def test_what_is_absent_is_derived(tmp_path: Path) -> None:
    assert layout(tmp_path, tp=2, pp=2).dp == 4
    assert layout(tmp_path, dp=16).micro_batch == 2
    assert layout(tmp_path, dp=4, accumulate=2).micro_batch == 4
    assert (
        one(tmp_path, changed(train={"batch_tokens": ...}, layout={"accumulate": 3})).request.profile.global_batch == 96
    )
    assert [layout(tmp_path, **words).algorithm for words in ({"tp": 2}, {"sp": 2}, {})] == ["megatron", "isp", "data"]
    assert layout(tmp_path, train={"recompute": "selective"}).recompute == "selective"


def test_one_group_written_twice_is_one_group(tmp_path: Path) -> None:
    once = layout(tmp_path, dp=2, tp=8)
    assert layout(tmp_path, dp=2, tp=8, sp=8) == once
    assert layout(tmp_path, tp=8, sp=8, algorithm="megatron") == once
    assert layout(tmp_path, sp=8, algorithm="megatron-sp") == once
    both = layout(tmp_path, dp=1, tp=4, sp=4)
    assert (both.tp, both.sp) == (4, 4), "16 GPUs have room for both"
    assert layout(tmp_path, dp=2, tp=8, algorithm="ulysses") == layout(tmp_path, dp=2, sp=8)


@pytest.mark.parametrize(
    ("name", "states"),
    [("ddp", (1, 1, 1)), ("ZeRO-1", (1, 1, 16)), ("zero_2", (1, 16, 16)), ("FSDP", (16, 16, 16)), ("data", (1, 1, 1))],
)
def test_other_systems_names_split_their_states(tmp_path: Path, name: str, states: tuple[int, ...]) -> None:
    found = layout(tmp_path, dp=16, algorithm=name)
    assert (found.algorithm, found.params, found.grads, found.optimizer) == ("data", *states)
    given = layout(tmp_path, dp=16, algorithm=name, shard={"params": 1, "grads": 1, "optimizer": 8})
    assert given.optimizer == 8


def test_a_state_that_is_not_named_is_split_as_little_as_nesting_allows(tmp_path: Path) -> None:
    found = layout(tmp_path, dp=16, shard={"params": 8})
    assert (found.params, found.grads, found.optimizer) == (8, 8, 8)
    found = layout(tmp_path, dp=16, shard={"optimizer": 8})
    assert (found.params, found.grads, found.optimizer) == (1, 1, 8)


def test_four_times_the_width_means_two_matrices_unless_said(tmp_path: Path) -> None:
    def parameters(**model: Any) -> int:
        return one(tmp_path, changed(model=model)).request.profile.parameters

    two = parameters()
    assert parameters(gated=True) - two == 24 * 2048 * 8192
    assert parameters(gated=False) == two == parameters(kv_heads=16)
    assert parameters(feed_forward=6144) > two - 24 * 2 * 2048 * 2048
    assert parameters(feed_forward=6144) == parameters(feed_forward=6144, gated=True)


def test_equal_rows_share_one_request_whatever_their_keys_order(tmp_path: Path) -> None:
    turned = {name: dict(reversed(ROW[name].items())) for name in reversed(list(ROW))}
    other = changed(layout={"shard": {"optimizer": 8}}, measured={"step_seconds": 3.0})
    found = [row.measurement for row in read(lines(tmp_path, ROW, "", "# no row", turned, other)).rows]
    assert len({id(row.request) for row in found}) == len({id(row.cluster) for row in found}) == 1
    assert len({row.group for row in read(tmp_path / "rows.jsonl").rows}) == 1
    assert [row.label for row in found] == ["line 1", "line 4", "line 5"]


def test_a_cluster_of_more_devices_than_ranks_uses_the_first(tmp_path: Path) -> None:
    mixed = {"nodes": [{"device": "H100", "devices": 8}, {"device": "T4", "devices": 8}], "links": {"between": 1e10}}
    row = changed(layout={"dp": 8, "accumulate": ..., "micro_batch": 1})
    fast = one(tmp_path, {**row, "cluster": mixed})
    slow = one(tmp_path, {**row, "cluster": {**mixed, "nodes": mixed["nodes"][::-1]}})  # type: ignore[index]
    everything = replace(fast, layout=replace(fast.layout, dp=16))
    times = [Batch([one_]).predict(PLAIN)[0][0] for one_ in (fast, slow, everything)]
    assert times[1] > 3 * times[0]
    assert times[2] > times[0], "the slowest device sets the pace"


JSON: dict[str, tuple[Any, str]] = {
    "not valid JSON": ('{"model": ', "one whole JSON object"),
    "unknown key model.dephth": (changed(model={"dephth": 3, "depth": ...}), "model.depth"),
    "unknown key layout.micro_bach": (changed(layout={"micro_bach": 1, "micro_batch": ...}), "layout.micro_batch"),
    "unknown key measured.step_second": (changed(measured={"step_second": 1, "step_seconds": ...}), "step_seconds"),
    "unknown key row.measurd": ({**{n: ROW[n] for n in ROW if n != "measured"}, "measurd": {}}, "measured"),
    "'meagtron' is not known": (changed(layout={"algorithm": "meagtron"}), "megatron"),
    "unknown device 'A100-80G'": (changed(cluster={"nodes": [{"device": "A100-80G"}]}), "A100-80GB"),
    "links.between is missing": (changed(cluster={"links": {}}), "400Gbit/s"),
    "-4": (changed(cluster={"links": {"between": "-4Gbit/s"}}), "try"),
    "= 32 ranks": (changed(layout={"dp": 32}), "layout.dp = 16"),
    "optimizer = 3 does not divide": (changed(layout={"shard": {"optimizer": 3}}), "optimizer = 2"),
    "whole number of sequences": (changed(train={"batch_tokens": 5000}), "5120"),
    "train.sequence is missing": (changed(train={"sequence": ...}), "2048"),
    "model.depth is missing": (changed(model={"depth": ...}), "model.shape"),
    '"lama-7b" is not a known shape': ({**ROW, "model": {"shape": "lama-7b"}}, "llama-7b"),
    "layout.pp = 16 is more than": (changed(model={"depth": 8}, layout={"pp": 16, "dp": 1}), "8 or fewer"),
    "precision = 'bf61'": (changed(train={"precision": "bf61"}), "bf16"),
    "no rate for bf16": (changed(cluster={"nodes": [{"device": "T4", "count": 16}]}, train={"precision": "bf16"}), ""),
    "recompute = 'fulll'": (changed(layout={"recompute": "fulll"}), "full"),
    "step_seconds = '1s'": (changed(measured={"step_seconds": "1s"}), "number above 0"),
    "tp = 0": (changed(layout={"tp": 0}), "1 or more"),
    "there is no 'layout'": ({n: ROW[n] for n in ROW if n != "layout"}, "layout"),
    "model.kv_heads = 3": (changed(model={"kv_heads": 3}), "model.kv_heads = 16"),
    "layout.stages contradicts": (changed(layout={"pp": 2, "dp": 8, "stages": [12, 11]}), "sum is 24"),
    "layout.stages = '12/12'": (changed(layout={"stages": "12/12"}), "4-4-3"),
    "precision = 'fp8'": (changed(train={"precision": "fp8"}), "fp8 ="),
    "tune.kind = 'lra'": ({**ROW, "tune": {"kind": "lra"}}, "lora"),
    "unknown key tune.rnk": ({**ROW, "tune": {"rnk": 4}}, "tune.rank"),
    "tune.targets = 'query'": ({**ROW, "tune": {"targets": "query"}}, "query"),
    "model.v_head_dim = None": (
        changed(model={"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}),
        "1 or more",
    ),
    "more than the batch": (changed(layout={"dp": 16}, train={"batch_tokens": 8192}), "8 or fewer"),
    "train.optimizer = 'adamwx'": (changed(train={"optimizer": "adamwx"}), "adamw"),
}


@pytest.mark.parametrize("wrong", JSON)
def test_a_wrong_row_is_refused_by_file_line_and_key(tmp_path: Path, wrong: str) -> None:
    row, hint = JSON[wrong]
    with pytest.raises(UserError) as error:
        read(lines(tmp_path, ROW, row))
    text = str(error.value)
    assert wrong in text
    assert hint in text
    assert f"{tmp_path / 'rows.jsonl'}, line 2: " in text
    assert "  try: " in text


def test_what_is_foreign_is_left_out_and_said(tmp_path: Path) -> None:
    found = read(lines(tmp_path, {**changed(train={"framework": "x"}), "id": 7}))
    assert any("train.framework" in note for note in found.notes)
    assert found.rows[0].given["id"] == 7
    assert read(lines(tmp_path, ROW)).notes == ()


LEAVES = [(name, key) for name in ROW for key in ROW[name]] + [(name, "") for name in ROW]
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=8), st.just([]), st.just({}),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2), st.lists(st.none(), max_size=2),
)  # fmt: skip
DEEPER = ("layout.tp", "layout.sp", "layout.pp", "layout.shard", "layout.algorithm", "layout.chunks", "model.gated",
    "model.kv_heads", "model.shape", "model.kind", "train.optimizer", "train.recompute", "train.compile",
    "model.head_size", "model.experts", "model.kv_lora_rank", "layout.ep", "layout.stages", "layout.placement",
    "layout.window", "train.states", "tune.kind", "tune.rank", "tune.targets", "tune.frozen")  # fmt: skip


@settings(max_examples=150)
@given(st.sampled_from(LEAVES + [tuple(one.split(".")) for one in DEEPER]), VALUES)
def test_no_value_raises_anything_but_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, at: tuple[str, str], value: Any
) -> None:
    name, key = at
    row = json.loads(json.dumps(ROW))
    row[name] = {**row.get(name, {}), key: value} if key else value
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(row))
    try:
        found = read(path)
    except UserError:
        with pytest.raises(UserError, match=r"any\.jsonl, line 1"):
            read(path)
        return
    seconds, peak, _ = Batch(found.measurements).predict(PLAIN)
    assert np.all(np.isfinite(seconds) & (seconds > 0) & (peak > 0))
