"""The page of a trace: beside it, here where that may not be written to, and whole where a trace tells little."""

from __future__ import annotations

import os

import pytest

from espalier.ops import job_report, job_trace
from espalier.recipe.errors import UserError


@pytest.fixture
def found(tmp_path):
    path = tmp_path / "<b>.csv"
    path.write_text("gpu_num,duration\n4,60\n2,30\n")
    return job_trace.characterise(job_trace.read(path))


def test_a_trace_that_tells_little_has_a_page(found):
    page = job_report.render(found)
    assert page.count("<svg") == 1  # of run times alone
    assert "<b>.csv" not in page
    assert "&lt;b&gt;.csv" in page


def test_the_page_goes_here_where_its_place_may_not_be_written(found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert job_report.write(tmp_path / "no" / "a.html", found).exists()
    assert sorted(os.listdir(tmp_path)) == ["<b>.csv", "a.html"]
    (tmp_path / "a.html").unlink()
    (tmp_path / "a.html").mkdir()
    with pytest.raises(UserError, match=r"a\.html"):
        job_report.write(tmp_path / "no" / "a.html", found)
