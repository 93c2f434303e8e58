"""`espalier plan` refuses what does not go together, before anything is computed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.cli import main as cli

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


@pytest.mark.slow
def test_a_plan_imports_neither_dtensor_nor_checkpoints() -> None:
    script = "import sys; from espalier.cli import plan\n"
    script += "slow = {'torch.distributed.tensor', 'torch.distributed.checkpoint', 'sympy'} & set(sys.modules)\n"
    script += "assert not slow, slow\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False)
    assert not done.returncode, done.stderr


NODES = '[[nodes]]\ncount = 2\ndevice = "A100-80GB"\ndevices = 8\n{}\n[links]\nbetween = "400Gbit/s"\n'
LLAMA = str(Path(__file__).parents[2] / "examples" / "llama-7b.toml")


def planned(folder: Path, more: str, *words: str) -> list[str]:
    (folder / "cluster.toml").write_text(NODES.format(more))
    return ["plan", LLAMA, "--cluster", str(folder / "cluster.toml"), "train.steps=1000", *words]


def test_what_if_an_option_were_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other plan is that of the changed recipe and cluster together."""
    assert cli.main(planned(tmp_path, "", "--json", "--what-if", "model.depth=16", "--what-if", "nodes.count=4")) == 0
    both = json.loads(capsys.readouterr().out)
    (tmp_path / "c.toml").write_text(NODES.format("").replace("count = 2", "count = 4"))
    other = ["plan", LLAMA, "--cluster", str(tmp_path / "c.toml"), "train.steps=1000", "model.depth=16", "--json"]
    assert cli.main(other) == 0
    alone = json.loads(capsys.readouterr().out)
    assert both["what_if"]["predicted"]["step_seconds"] == alone["predicted"]["step_seconds"]
    assert both["predicted"]["step_seconds"] != alone["predicted"]["step_seconds"]


def test_what_if_of_what_cannot_run_says_why_not_beside_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what it says to try is accepted as it stands."""
    asked = planned(tmp_path, "", "sync.kind=co2")
    assert cli.main([*asked, "--what-if", "plan.pin.tp=8"]) == 0
    said = capsys.readouterr().out
    assert "predicted step" in said
    assert "What if: plan.pin.tp = 8 cannot run.\n  why: outer_rounds does not allow" in said
    offered = re.findall(r"try: plan\.pin\.tp=1, or (\S+) instead of outer_rounds", said)
    assert cli.main([*asked, "plan.pin.tp=8", *offered, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["tp"] == 8
    assert cli.main([*asked, "--what-if", "plan.pin.tp=8", "--json"]) == 0
    assert "outer_rounds" in json.loads(capsys.readouterr().out)["what_if"]["why"]


def test_the_answer_comes_first_and_formulas_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(planned(tmp_path, "")) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("Plan (search): 16 GPUs")
    order = [plain.index(words) for words in ("predicted step", "several GPUs", "not taken", "Derived:")]
    assert order == sorted(order)
    assert "formula or source" not in plain
    page = tmp_path / "plan.html"
    assert cli.main(planned(tmp_path, "", "--what-if", "nodes.count=4", "--sources", "--html", str(page))) == 0
    first, step, empty, *rest = capsys.readouterr().out.splitlines()
    assert re.match(r"What if: .* on 32 GPUs on 4 machines", first)
    assert re.match(r"  predicted step .* instead of .*", step)
    assert (empty, rest[0]) == ("", plain.splitlines()[0])
    assert "\n".join(rest).index("formula or source") > "\n".join(rest).index("Derived:")
    assert page.read_text().index("What if: ") < page.read_text().index("Time against memory")


def test_a_change_with_which_it_fits_is_not_compared_with_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.toml").write_text('[[nodes]]\ndevice = "A100-80GB"\n')
    one = ["plan", LLAMA, "--cluster", str(tmp_path / "one.toml"), "plan.pin.offload=none"]
    assert cli.main([*one, "--what-if", "nodes.devices=8"]) == 2
    said = capsys.readouterr().out
    assert ", where nothing fits now, memory" in said.splitlines()[1]
    assert said.index("What if: ") < said.index("The model does not fit") < said.index("No plan fits.")
    assert cli.main(planned(tmp_path, "", "--what-if", "plan.memory=1GiB")) == 0
    assert capsys.readouterr().out.startswith("What if: nothing fits; ")


SERVED = """
[[nodes]]
count = 2
device = "cpu"
cores = 1
memory = "4GiB"

[[nodes]]
device = "cpu"
cores = 2
memory = "4GiB"
role = "optimizer"
disks = [{ path = "/", write = 1e9, read = 1e9, iops = 1e4 }]

[links]
between = "1Gbit/s"
"""


@pytest.mark.parametrize(
    ("change", "longer", "roles"),
    [
        ("nodes.1.disks=2MB/s", True, ["optimizer"]),
        ("nodes.1.count=2", False, ["optimizer", "optimizer"]),
        ('plan.pin.roles=["standby"]', False, ["optimizer", "standby"]),
    ],
)
def test_what_if_an_optimizer_node_were_another(
    tmp_path: Path, change: str, longer: bool, roles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "served.toml").write_text(SERVED)
    (tmp_path / "text.py").write_text("".join(f"x{one} = {one} * {one}\n" for one in range(2000)))
    recipe = str(Path(__file__).parents[2] / "examples" / "luwu.toml")
    more = ["--cluster", str(tmp_path / "served.toml"), f"data.path={tmp_path / 'text.py'}", "--json"]
    assert cli.main(["plan", recipe, *more, "--what-if", change]) == 0
    both = json.loads(capsys.readouterr().out)
    assert [one["role"] for one in both["ranks"]] == ["trainer", "trainer", "optimizer"]
    assert [one["role"] for one in both["what_if"]["ranks"]][2 : 2 + len(roles)] == roles
    now, then = (one["predicted"]["step_seconds"] for one in (both, both["what_if"]))
    assert then > 1.5 * now if longer else then <= now * 1.001


def test_what_if_of_an_unknown_option_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(planned(tmp_path, "", "--what-if", "model.dpth=16")) == 2
    assert "did you mean model.depth" in capsys.readouterr().err


def test_energy_and_price_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """400 W for each device that is used; each machine at its price."""
    page = tmp_path / "plan.html"
    assert cli.main(planned(tmp_path, "price = 20.0", "--json", "--html", str(page))) == 0
    plan = json.loads(capsys.readouterr().out)
    used = {(rank["node"], rank["device"]) for rank in plan["ranks"]}
    assert plan["predicted"]["watts"] == 400 * len(used)
    assert plan["predicted"]["price_per_hour"] == 20 * len({node for node, _ in used})
    hours = 1000 * plan["predicted"]["step_seconds"] / 3600
    assert cli.main(planned(tmp_path, "price = 20.0")) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "predicted run" in one]
    assert f"{float(plan['predicted']['price_per_hour'] * hours):,.0f}" in line.rpartition("price ")[2]
    assert "kWh" in line
    assert "kWh" in page.read_text()


def test_without_a_price_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(planned(tmp_path, "")) == 0
    assert ", price " not in capsys.readouterr().out
    assert cli.main(planned(tmp_path, "price = -1.0")) == 2
    assert "price = 2.5" in capsys.readouterr().err
