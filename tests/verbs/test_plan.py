"""`espalier plan` refuses what does not go together, before anything is computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from espalier import cli

ROWS = "gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp,iter_ms\n8,32,2,2048,16,24,1024,2,2,2,900.5\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


@pytest.mark.parametrize(
    ("others", "named"),
    [
        (["recipe.toml"], "recipe"), (["--html", "plan.html"], "--html"), (["--cluster", "cluster.toml"], "--cluster"),
        (["--what-if", "links.between=1Gbit/s"], "--what-if"),
    ],
)  # fmt: skip
def test_score_with_other_options_is_refused(
    rows: Path, others: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--score", str(rows), *others]) == 2
    said = capsys.readouterr()
    assert f"--score takes no {named}" in said.err
    assert not said.out
    assert [one.name for one in rows.parent.iterdir()] == ["rows.csv"], "nothing was written"


def test_score_alone_writes_the_rows_beside_the_file(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--score", str(rows)]) == 0
    assert "MAPE" in capsys.readouterr().out
    written = (rows.parent / "rows.scored.csv").read_text().splitlines()
    assert written[0].endswith("iter_ms,predicted_ms")
    assert float(written[1].rpartition(",")[2]) > 0


@pytest.mark.parametrize(("arguments", "named"), [([], "needs a recipe"), (["--out", "rows.csv"], "needs a recipe")])
def test_without_score_there_is_a_recipe(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_plan_imports_neither_dtensor_nor_checkpoints() -> None:
    script = "import sys; from espalier.verbs import plan\n"
    script += "slow = {'torch.distributed.tensor', 'torch.distributed.checkpoint', 'sympy'} & set(sys.modules)\n"
    script += "assert not slow, slow\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False)
    assert not done.returncode, done.stderr
