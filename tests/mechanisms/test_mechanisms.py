"""A mechanism is a folder and one row: each toy runs in place of the plain answer, and the plain answer judges it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gathered_keys import mechanism as gathered_keys
from halves import codec as halves
from looped_experts import mechanism as looped_experts
from rated import mechanism as rated
from reversed_batches import choice as reversed_choice
from reversed_batches import mechanism as reversed_batches
from sums import mechanism as sums
from watched_sums import mechanism as watched_sums

import espalier
from espalier.comm import codecs
from espalier.graph.data.graph import DataSplit, Graph
from espalier.graph.workload import GraphWorkload
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.machine import cluster as clusters
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan import base as plans
from espalier.plan import choice, replan
from espalier.plan.compose import Claim
from espalier.plan.decide import decide
from espalier.recipe import Pin, defaults, mechanism_options, recipe_file
from espalier.recipe.errors import UserError
from espalier.recipe.mechanism_options import OptionsRow
from espalier.train import rank_spec as launch
from espalier.train import request_from_recipe, table, trainer, worker
from espalier.train.mechanism import Mechanism
from espalier.train.rank_setup import RankSetup

TOYS = Path(__file__).parents[1] / "toys"
STEPS = 4
MACHINES = clusters.loads(
    '[[nodes]]\ncount = 2\ndevice = "cpu"\ncores = 2\nmemory = "8GiB"\n[links]\nbetween = "1Gbit/s"\n'
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        text = "".join(f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(60))
        (folder / f"{number}.py").write_text(text)
    return folder


def recipe_of(corpus: Path, kind: str = "gpt", tables: Any = None, **train: Any) -> Any:
    table = {
        **(tables or {}),
        "model": {"kind": kind, "depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 64},
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2},
        "train": {
            "steps": STEPS,
            "sequence": 32,
            "batch_tokens": 256,
            "validate_tokens": 512,
            "precision": "fp64",
            "optimizer": {"kind": "adamw"},
            **train,
        },
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(ranks: int, **changes: Any) -> plans.Plan:
    cuts = [8 * number // ranks for number in range(ranks + 1)]
    shares = tuple(plans.Rank(share=(cuts[number], cuts[number + 1])) for number in range(ranks))
    return plans.Plan(**{"ranks": shares, "micro_batch": 2, "precision": "fp64", **changes})


def train(workload: Any, recipe: Any, plan: plans.Plan, *toys: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, then the held-out loss."""

    def life(place: launch.RankSpec) -> list[tuple[float, float]]:
        seen: list[tuple[float, float]] = []

        def emit(event: str, **fields: Any) -> None:
            if event in ("step", "validation"):
                seen.append((fields["loss"], fields.get("gradient_norm", 0.0)))

        with worker.joined(place, 90.0) as channel:
            setting = RankSetup(recipe, plan, workload, place, emit=emit)
            trainer.Trainer(setting, channel, table_with(*toys)).run()
        return seen

    places = launch.places(plan)
    return agent.run(life, places)[0] if len(places) > 1 else life(places[0])


def table_with(*toys: Any) -> tuple[Any, ...]:
    """The product's rows, but its own attention over ranks where a toy is to be it, and the toys."""
    return (*(row for row in table.TABLE if "attention_2d" not in getattr(row, "module", "")), *toys)


def near(found: list[tuple[float, float]], wanted: list[tuple[float, float]], tolerance: float = 1e-9) -> None:
    assert len(found) == len(wanted) > STEPS
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=tolerance)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shard_rule_is_one_row(corpus: Path, ranks: int) -> None:
    recipe = recipe_of(corpus)
    workload = open_language(recipe)
    near(train(workload, recipe, plan_of(ranks), sums.choose), train(workload, recipe, plan_of(ranks)))


@pytest.fixture
def reversed_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mechanism_options.TABLE, "reversed_batches", OptionsRow("reversed_batches.options"))


@pytest.mark.usefixtures("reversed_options")
def test_a_schedule_is_one_row(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(corpus, tables={"reversed_batches": {"keep": 1}})
    workload, kept = open_language(recipe), set()
    run = reversed_batches.Reversed.run

    def seen(schedule: Any, *given: Any) -> Any:
        kept.add(schedule.keep)
        return run(schedule, *given)

    monkeypatch.setattr(reversed_batches.Reversed, "run", seen)
    near(train(workload, recipe, plan_of(2), reversed_batches.choose), train(workload, recipe, plan_of(2)))
    train(workload, recipe, plan_of(1), reversed_batches.choose)  # in this process
    assert kept == {1}
    assert reversed_batches.choose(recipe_of(corpus), plan_of(2)) is None


@pytest.mark.usefixtures("reversed_options")
def test_options_of_a_mechanism_are_read_written_and_refused_as_all_are(corpus: Path) -> None:
    recipe = recipe_of(corpus, tables={"reversed_batches": {"keep": 2}})
    assert recipe_file.to_table(recipe)["reversed_batches"] == {"keep": 2}
    assert recipe_file.from_table(recipe_file.to_table(recipe)) == recipe
    assert ("reversed_batches.keep", 2, 3) in recipe_file.changed(
        recipe, recipe_of(corpus, tables={"reversed_batches": {"keep": 3}})
    )
    for options, words in (
        ({"keep": -1}, "reversed_batches.keep = -1 is not possible"),
        ({"keep": "x"}, "reversed_batches.keep: expected int, got 'x'"),
        ({"kep": 1}, "unknown key reversed_batches.kep"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            recipe_of(corpus, tables={"reversed_batches": options})


def test_a_table_without_its_row_is_refused_by_name(corpus: Path) -> None:
    with pytest.raises(UserError, match="unknown key reversed_batches"):
        recipe_of(corpus, tables={"reversed_batches": {}})


def test_an_agreement_is_one_row(corpus: Path) -> None:
    slow = recipe_of(corpus, optimizer={"kind": "adamw", "learning_rate": 1e-3})
    fast = recipe_of(corpus, optimizer={"kind": "adamw", "learning_rate": 2e-3})
    # At half the rate; matrices decay by the product of rate and decay, so that is equal too.
    workload = open_language(fast)
    near(train(workload, fast, plan_of(2), rated.choose), train(workload, slow, plan_of(2)))


@pytest.mark.usefixtures("reversed_options")
def test_a_planned_schedule_is_a_folder_and_a_row(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row plans it with its cost and its words; the plan file keeps it, and the trainer's row finds it there."""
    recipe = recipe_of(corpus, tables={"reversed_batches": {}})
    request = request_from_recipe.of_recipe(recipe).changed(pin=Pin(ranks=1, micro_batch=2))
    plain = decide(request, MACHINES).taken
    row = choice.ChoiceRow(
        "reversed_batches.choice", lambda request, cluster: "reversed_batches" in request.recipe.mechanisms
    )
    monkeypatch.setitem(choice.TABLE, "reversed_batches", row)
    plan = decide(request, MACHINES).taken
    assert plan.predicted is not None
    assert plan.predicted.terms["reversed"] == 4 * reversed_choice.EACH
    assert plan.step_seconds == pytest.approx(plain.step_seconds + plan.predicted.terms["reversed"])
    assert [words for words in plan.why if words not in plain.why][-1].startswith("4 micro-batches run from the last")
    read = plans.loads(plans.dumps(plan))
    assert read == plan
    workload = open_language(recipe)
    assert isinstance(reversed_batches.choose_planned(recipe, read), reversed_batches.ReversedMechanism)
    near(train(workload, recipe, read, reversed_batches.choose_planned), train(workload, recipe, plain))
    assert decide(request.changed(recipe=recipe_of(corpus)), MACHINES).taken.choices == {}


class Moved(Mechanism):
    """States move to memory that copies and rollback do not reach."""

    def __init__(self, forbids: str) -> None:
        self.claim = Claim("moved", question="placement", forbids=frozenset({forbids}))


@pytest.mark.parametrize(
    ("forbids", "option", "off"),
    [("states are copied", "memory", 0), ("steps are taken back", "rollback", "never")],
)
def test_copies_and_rollback_are_refused_by_whom_they_would_break(
    corpus: Path, forbids: str, option: str, off: Any
) -> None:
    recipe = recipe_of(corpus)
    rows = (*table.TABLE, lambda recipe, plan: Moved(forbids))
    with pytest.raises(UserError, match="moved") as refused:
        table.ordered(recipe, plan_of(2), rows)
    assert forbids in refused.value.why
    assert refused.value.do == f"leave out moved or faults.{option}"
    faults = msgspec.structs.replace(recipe.faults, **{option: off})
    without = msgspec.structs.replace(recipe, faults=faults)
    assert "moved" in [one.claim.name for one in table.ordered(without, plan_of(2), rows)]


def test_an_attention_over_ranks_is_one_row(corpus: Path) -> None:
    recipe = recipe_of(corpus)
    workload = open_language(recipe)
    cut = plans.Plan(
        ranks=(plans.Rank(share=(0, 8)), plans.Rank(share=(0, 8))),
        micro_batch=2,
        precision="fp64",
        stages=(plans.Stage(ranks=(0, 1), layers=(0, 2), context=2, window=2),),
    )
    with pytest.raises(UserError, match="cut_sequences cannot run as planned") as refused:
        table.ordered(recipe, cut, table_with())
    assert "attention over cut sequences" in refused.value.why
    near(train(workload, recipe, cut, gathered_keys.choose), train(workload, recipe, plan_of(1)))


def test_a_route_is_one_row(corpus: Path) -> None:
    recipe = recipe_of(corpus, "moe")
    workload = open_language(recipe)
    near(train(workload, recipe, plan_of(2), looped_experts.choose), train(workload, recipe, plan_of(2)))


def test_an_aggregation_is_one_row() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 60)
    parts = DataSplit(np.arange(30), np.arange(30, 45), np.arange(45, 60))
    graph = Graph.from_edges(
        *random.integers(0, 60, (2, 240)), features=np.eye(3, 5)[labels], labels=labels, parts=parts, undirected=True
    )
    table = {
        "model": {"kind": "gat"},
        "data": {"path": "made"},
        "train": {"steps": STEPS, "precision": "fp64", "validate_every": STEPS},
    }
    recipe = defaults.resolve(recipe_file.from_table(table))[0]
    workload = GraphWorkload(recipe, graph)
    samples = workload.global_batch
    plan = plans.Plan(ranks=(plans.Rank(share=(0, samples)),), micro_batch=samples, precision="fp64")
    toy = watched_sums.WatchedSums()
    found = train(workload, recipe, plan, lambda recipe, plan: toy)
    assert found == train(workload, recipe, plan)
    assert toy.rows


def test_a_codec_is_one_row(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs.FAMILIES, "halves", lambda text: halves.Halves())
    recipe = recipe_of(corpus)
    workload = open_language(recipe)
    rounded = plan_of(2, exchanges=(plans.Exchange(traffic="gradients", codec="halves"),))
    found, plain = train(workload, recipe, rounded), train(workload, recipe, plan_of(2))
    near(found, plain, 5e-3)
    assert found != plain


def test_a_codec_is_planned_by_its_row(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codecs.FAMILIES, "halves", lambda text: halves.Halves())
    request = request_from_recipe.of_recipe(recipe_of(corpus)).changed(pin=Pin(ranks=2))
    plain, plan = (decide(request.changed(codec=codec), MACHINES).taken for codec in ("exact", "halves"))
    assert [(one.traffic, one.codec) for one in plan.exchanges] == [("gradients", "halves")]
    assert plan.predicted is not None
    assert plain.predicted is not None
    sent, whole = (one.predicted.sent_bytes["gradients"] for one in (plan, plain))
    assert sent == pytest.approx(whole / 2, rel=0.01)
    assert "comm.codec = halves" in plan.why


def test_options_of_a_codec_are_in_its_name(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the planner names the codec as the recipe says it; the ranks make it by that name."""
    monkeypatch.setitem(codecs.FAMILIES, "halves", lambda text: halves.Halves(float(text or 1)))
    monkeypatch.setitem(mechanism_options.TABLE, "halves", OptionsRow("halves.options"))
    row = choice.ChoiceRow("halves.choice", lambda request, cluster: "halves" in request.recipe.mechanisms)
    monkeypatch.setattr(choice, "TABLE", {"halves": row, **choice.TABLE})
    recipe = recipe_of(corpus, tables={"halves": {"scale": 1024.0}})
    plan = decide(request_from_recipe.of_recipe(recipe).changed(pin=Pin(ranks=2)), MACHINES).taken
    assert [(exchange.traffic, exchange.codec) for exchange in plan.exchanges] == [("gradients", "halves:1024")]
    workload = open_language(recipe)
    rounded = plan_of(2, exchanges=(plans.Exchange(traffic="gradients", codec="halves:1024"),))
    near(train(workload, recipe, rounded), train(workload, recipe, plan_of(2)), 5e-3)
    with pytest.raises(UserError, match=re.escape("halves.scale = 0 is not possible")):
        recipe_of(corpus, tables={"halves": {"scale": 0.0}})


GONE = ("task_waves", "local_rounds", "unequal_pipelines")
PROGRAM = """
import sys
from espalier.cli.main import main

refused = main(["plan", "recipe.toml", "sync.kind=diloco"])
assert refused == 2, refused
sys.exit(main(["plan", "recipe.toml"]) or main(["train", "recipe.toml", "--run", "run"]))
"""


def test_mechanisms_are_deleted_with_their_folders_and_rows(corpus: Path, tmp_path: Path) -> None:
    """Without three of them text is planned and trained, and options of one of them are refused by name."""
    package = tmp_path / "src" / "espalier"
    partial = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")  # which other workers are writing
    shutil.copytree(
        Path(espalier.__file__).parent, package, ignore=partial
    )  # with its bytecode, which takes seconds to make
    for name in GONE:
        shutil.rmtree(package / "mechanisms" / name)
    for file, rows in (("plan/choice.py", 3), ("train/table.py", 3), ("recipe/mechanism_options.py", 1)):
        without_rows(package / file, rows)
    (tmp_path / "recipe.toml").write_text(
        "[model]\ndepth = 2\nwidth = 32\nheads = 4\nvocabulary = 300\n"
        f'[[data]]\npath = "{corpus}"\ncache = "cache"\nvalidation = 0.2\n'
        "[train]\nsteps = 2\nsequence = 32\nbatch_tokens = 256\nvalidate_tokens = 256\n"
        "[plan]\ntrial = false\npin.ranks = 1\n"
    )
    path = os.pathsep.join([str(tmp_path / "src"), *filter(None, sys.path)])
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "run" / "plan.json").exists()
    assert "Micro-batch" in ran.stdout
    assert "sync.kind = 'diloco' is not a choice" in ran.stdout + ran.stderr


def without_rows(table: Path, rows: int) -> None:
    """Deletes the rows of `GONE`, each on lines of its own."""
    lines, deleted = table.read_text().splitlines(keepends=True), 0
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            module = str(node.args[0].value).removeprefix("espalier.mechanisms.")
            if module.startswith(GONE):
                lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
                deleted += 1
    assert deleted >= rows
    table.write_text("".join(lines))


def test_a_seam_that_a_model_lacks_is_refused_by_name(corpus: Path) -> None:
    recipe = recipe_of(corpus)
    with pytest.raises(UserError, match="GPT has no seam 'route', which looped_experts fills"):
        train(open_language(recipe), recipe, plan_of(1), looped_experts.choose)


def test_two_answers_to_one_question_are_refused(corpus: Path) -> None:
    def rerated(recipe: Any, plan: Any) -> Mechanism:
        found = rated.RatedMechanism()
        found.claim = type(found.claim)("rerated", "sync")
        return found

    recipe, rows = recipe_of(corpus), (*table.TABLE, rated.choose, rerated)
    with pytest.raises(UserError, match="rated and rerated cannot run together"):
        table.ordered(recipe, plan_of(2), rows)


def test_toys_need_nothing_but_public_parts_of_the_package() -> None:
    """No toy reaches into the trainer, the planner or the command line, and none is imported by the package."""
    allowed = (
        "recipe.sections",
        "recipe.errors",
        "plan.request",
        "comm",
        "mechanisms",
        "optim",
        "parallel",
        "plan.axes",
        "plan.compose",
        "train.mechanism",
        "train.seams",
    )
    allowed += ("train.whole_model", "train.every_step", "plan.ask", "plan.base", "plan.choice")
    files = sorted(TOYS.rglob("*.py"))
    assert len(files) == 12
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("espalier"):
                module = (node.module or "").removeprefix("espalier.")
                assert module.startswith(allowed), f"{file.name} imports {node.module}"


def test_mechanisms_are_applied_in_the_order_that_compose_finds(corpus: Path) -> None:
    recipe = recipe_of(corpus, optimizer={"kind": "muon"})
    plan = plan_of(1, recompute="block", precision="bf16", compile=True)
    names = [one.claim.question for one in table.ordered(recipe, plan)]
    assert names.index("model") < names.index("recompute") < names.index("compile") < names.index("shard")
    assert names.index("matrices") < names.index("shard") < names.index("stages") < names.index("sync")
    assert names.index("precision") < names.index("shard") < names.index("optimizer") < names.index("sync")


def test_the_page_shows_the_toys_as_they_are() -> None:
    page = (TOYS.parent.parent / "docs" / "mechanisms.md").read_text()
    shown = re.findall(
        r"`tests/toys/(\S+\.py)`:\n\n(?:<!--[^\n]*-->\n)?```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    assert len(shown) == 5
    for name, code in shown:
        assert code in (TOYS / name).read_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"choices": {"local_rounds": LocalRoundsState(replicas=((0,), (1,)))}}, "replicas differ between rounds"),
        ({"stages": (plans.Stage(ranks=(0, 1), layers=(0, 2), tensor=2),)}, "the model is cut"),
        ({"ranks": (plans.Rank(), plans.Rank(node=1))}, "several machines"),
    ],
)
def test_which_plans_are_planned_again_while_a_run_goes_on(corpus: Path, changes: dict[str, Any], reason: str) -> None:
    recipe, plan = recipe_of(corpus), plans.Plan(**{"ranks": (plans.Rank(), plans.Rank()), **changes})
    with pytest.raises(UserError) as refused:
        table.require_beside(recipe, plan, replan.CLAIM)
    assert reason in refused.value.why
    table.require_beside(recipe, plans.Plan(ranks=(plans.Rank(), plans.Rank())), replan.CLAIM)
