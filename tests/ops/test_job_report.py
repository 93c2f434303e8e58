"""`espalier report --trace`: tables here, plots in a page, of a file of jobs or a folder of runs."""

from __future__ import annotations

import json
import time

import pytest

from espalier.cli import main as cli
from espalier.track import page as pages
from espalier.track.events import Log

TRACE = """gpu_num,type,state,submit_time,start_time,duration,queue
16,Pretrain,COMPLETED,0,60,3600,60
8,Pretrain,FAILED,100,160,600,60
1,Eval,FAILED,0,10,30,10
0,Other,COMPLETED,0,0,5,0
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "cluster.csv"
    path.write_text(TRACE)
    return path


def test_the_tables_and_the_page(trace, capsys):
    assert cli.main(["report", "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    for text in ("3 GPU jobs", "1 jobs without GPUs", "Pretrain", "COMPLETED", "failed by", "waits:", "runs:"):
        assert text in said
    page = trace.with_suffix(".html").read_text()
    assert page.count("data-chart=") == 3
    assert "Pretrain" in page
    assert page.count("<script") == page.count(f"<script>{pages.script()}</script>") == 1


def test_json_is_one_object_without_nan(trace, capsys):
    assert cli.main(["report", "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["jobs"] == 3
    assert {one["name"]: round(one["time_share"], 4) for one in found["kinds"]} == {"Pretrain": 0.9995, "Eval": 0.0005}
    assert found["report"].endswith("cluster.html")


def test_runs_are_a_trace_and_their_failures_are_diagnosed(tmp_path, capsys):
    for name, reason in (("good", "finished"), ("bad", "failed")):
        with Log(tmp_path / name / "events.jsonl") as log:
            log.write("run", step=0, steps=2, ranks=2, workload="language", name=name)
            time.sleep(0.01)
            log.write("step", step=1, loss=2.0, tokens=1, seconds=0.1, memory=1)
            log.write("end", reason=reason, step=1)
    (tmp_path / "bad" / "logs").mkdir()
    (tmp_path / "bad" / "logs" / "trainer-1.log").write_text("KeyError: 'k'\n")
    assert cli.main(["report", "--json", "--trace", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["name"]: one["jobs"] for one in found["states"]} == {"COMPLETED": 1, "FAILED": 1}
    assert [one["name"] for one in found["causes"]] == ["Key Error"]
    assert found["kinds"][0]["gpus"] == 2


def test_bad_columns_and_no_arguments_are_told(trace, capsys):
    trace.write_text("a,b\n1,2\n")
    assert cli.main(["report", "--trace", str(trace)]) == 2
    said = capsys.readouterr().err
    assert "its columns: a, b" in said
    assert "AllocTRES" in said
    assert cli.main(["report"]) == 2
    assert "--trace" in capsys.readouterr().err
