"""Traces are read as they are written: Acme's columns, sacct's, our subset; what cannot be read is counted or named."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from espalier.ops import job_trace
from espalier.recipe.errors import UserError
from espalier.track.events import Log

ACME = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
a,u,2,16,32,Pretrain,COMPLETED,2023-03-01 00:00:00+08:00,2023-03-01 00:01:00+08:00,2023-03-01 01:01:00+08:00,3600,60,0
b,u2,1,1,4,Eval,FAILED,2023-03-01 00:00:00+08:00,2023-03-01 00:00:10+08:00,2023-03-01 00:00:40+08:00,30,10,30
c,u2,1,0,4,Other,COMPLETED,2023-03-01 00:00:00+08:00,2023-03-01 00:00:10+08:00,2023-03-01 00:00:40+08:00,30,10,0
"""
SACCT = """JobID|Partition|State|Submit|Start|End|ElapsedRaw|AllocTRES|ExitCode
11|llm|COMPLETED|2025-01-01T00:00:00|2025-01-01T00:10:00|2025-01-01T01:10:00|3600|cpu=64,gres/gpu:a100=8,gres/gpu=8,mem=1T|0:0
11.batch||COMPLETED|2025-01-01T00:10:00|2025-01-01T00:10:00|2025-01-01T01:10:00|3600|cpu=64|0:0
12|llm|CANCELLED by 1000|2025-01-01T00:00:00|2025-01-01T00:10:00|2025-01-01T00:20:00|600|cpu=8,gres/gpu=2|0:15
13|dev|FAILED|2025-01-01T00:00:00|2025-01-01T00:10:00|2025-01-01T00:11:00|60|gres/gpu=1|0:9
14|dev|FAILED|2025-01-01T00:00:00|2025-01-01T00:10:00|2025-01-01T00:11:00|60|gres/gpu=1|1:0
15|dev|OUT_OF_MEMORY|2025-01-01T00:00:00|2025-01-01T00:10:00|2025-01-01T00:11:00|60|gres/gpu=1|0:125
16|dev|PENDING|2025-01-01T00:00:00|Unknown|Unknown|0||0:0
"""


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_acmes_columns(tmp_path):
    found = job_trace.read(written(tmp_path, ACME))
    assert found.gpus.tolist() == [16, 1, 0]
    assert found.kinds.tolist() == ["Pretrain", "Eval", "Other"]
    assert found.seconds.tolist() == [3600, 30, 30]
    assert found.queued.tolist() == [60, 10, 10]
    assert found.causes.tolist() == ["", "not told", ""]
    assert found.started[0] - found.submitted[0] == 60


def test_sacct_as_it_prints(tmp_path):
    found = job_trace.read(written(tmp_path, SACCT))
    assert found.gpus.tolist() == [8, 2, 1, 1, 1, 0]
    assert found.states.tolist() == ["COMPLETED", "CANCELLED", "FAILED", "FAILED", "OUT_OF_MEMORY", "PENDING"]
    assert found.queued.tolist()[:5] == [600.0] * 5
    assert math.isnan(found.queued[5])
    assert found.causes.tolist() == ["", "", "signal 9", "exit code 1", "out of memory", ""]


def test_sacct_with_commas_and_clocks(tmp_path):
    text = "JobID,State,Elapsed,AllocGRES\n1,COMPLETED,1-02:03:04,gpu:4\n2,FAILED,00:30,gpu:a100:2\n"
    found = job_trace.read(written(tmp_path, text))
    assert found.seconds.tolist() == [93784, 30]
    assert found.gpus.tolist() == [4, 2]


def test_a_duration_is_what_lies_between_start_and_end(tmp_path):
    text = "gpu_num,start_time,end_time\n1,2025-01-01 00:00:00,2025-01-01 00:01:00\n"
    assert job_trace.read(written(tmp_path, text)).seconds.tolist() == [60]


def test_rows_that_cannot_be_read_are_counted_and_the_first_is_named(tmp_path):
    found = job_trace.read(written(tmp_path, ACME + "d,u,1,eight,4,Eval,FAILED,,,,5,1,1\ne,u\n"))
    assert len(found) == 3
    assert found.left_out[0] == 2
    assert "line 5" in found.left_out[1]
    assert "eight" in found.left_out[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("job,state\n1,FAILED\n", "number of GPUs"),
        ("gpu_num,state\n1,FAILED\n", "a duration, or a start and an end"),
        ("", "number of GPUs"),
        ("gpu_num,duration\n", "no job that can be read"),
        ("gpu_num,duration\nx,y\n", "no job that can be read"),
    ],
)
def test_a_file_that_is_no_trace_is_told_what_is_expected(tmp_path, text, says):
    with pytest.raises(UserError, match=says) as error:
        job_trace.read(written(tmp_path, text))
    assert "AllocTRES" in error.value.do


def test_a_missing_trace_and_a_folder_without_runs_are_named(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        job_trace.read(tmp_path / "no.csv")
    with pytest.raises(UserError, match="no run in the folder"):
        job_trace.of_runs(tmp_path)


def test_runs_are_jobs(tmp_path):
    with Log(tmp_path / "one" / "events.jsonl") as log:
        log.write("run", step=0, steps=2, ranks=2, workload="gpt", name="one")
        time.sleep(0.01)
        log.write("end", reason="failed", step=1)
    (tmp_path / "one" / "logs").mkdir()
    (tmp_path / "one" / "logs" / "trainer-1.log").write_text("KeyError: 'k'\n")
    found = job_trace.of_runs(tmp_path)
    assert (found.gpus.tolist(), found.kinds.tolist(), found.states.tolist()) == ([2.0], ["gpt"], ["FAILED"])
    assert found.causes.tolist() == ["Key Error"]
    assert 0.01 <= found.seconds[0] < 60
    assert np.isnan(found.queued[0])


def test_the_shared_subset_is_read_whole(data_folder):
    path = data_folder / "acme" / "kalos_completed_jobs.csv"
    if not path.is_file():
        pytest.skip("no trace beside the tables")
    found = job_trace.read(path)
    assert len(found) == 191
    assert found.left_out == (0, "")
    assert set(found.kinds.tolist()) == {"Pretrain", "Other/SFT"}
