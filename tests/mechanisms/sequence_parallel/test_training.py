"""A decoder whose sequences are cut over ranks trains as on one rank, through the Trainer and a plan."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.cli import resolve_recipe
from espalier.language.decoder_workload import TokenWindows
from espalier.language.workload import LanguageWorkload, open_language
from espalier.launch.ranks import agent
from espalier.machine import cluster
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.parallel.workload import Shard
from espalier.plan import base as plans
from espalier.plan.axes.sequence import SequenceGrid, SequenceLoad, cost
from espalier.plan.layout_estimate import estimate
from espalier.plan.layouts import Layouts
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted, UserError
from espalier.train import rank_spec as launch
from espalier.train import table, trainer, worker
from espalier.train.rank_setup import RankSetup
from espalier.train.workload_registry import Resolved

STEPS = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        text = "".join(f"def f{i * number}(x):\n    return x * {i} + {number}\n" for i in range(60))
        (folder / f"{number}.py").write_text(text)
    return folder


SIZE = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"kind": "gpt"},
    "moe": {"kind": "moe"},
    "positions": {
        "family": "ministral3",
        "rope": {"kind": "yarn", "factor": 4.0, "original": 8, "attention": 1.0, "query": 0.5},
    },
    "window": {"family": "mistral", "window": 5},
    "caps": {"family": "gemma2", "tied": True, "window": 5, "attention_cap": 2.0, "attention_scale": 0.2},
}


def recipe_of(corpus: Path, model: str = "gpt", packing: str = "stream", **train: Any) -> Any:
    table = {
        "model": SIZE | MODELS[model],
        "data": {"path": str(corpus), "cache": str(corpus.parent / "cache"), "validation": 0.2, "packing": packing},
        "train": {
            "steps": STEPS,
            "sequence": 37,
            "batch_tokens": 37 * 4,
            "validate_tokens": 37 * 6,
            "precision": "fp64",
            "optimizer": {"kind": "adamw"},
            **train,
        },
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(
    ranks: int, cut: tuple[int, int, int] = (1, 1, 1), speeds: tuple[float, ...] = (), **changes: Any
) -> plans.Plan:
    """`ranks` ranks, of which heads x context share a sequence in inner rings of a window."""
    heads, context, window = cut
    copies = ranks // (heads * context)
    shares = [(4 * number // copies, 4 * (number + 1) // copies) for number in range(copies)]
    stage = plans.Stage(
        ranks=tuple(range(ranks)), layers=(0, 2), heads=heads, context=context, window=window, speeds=speeds
    )
    each = tuple(plans.Rank(share=share) for share in shares for _ in range(heads * context))
    return plans.Plan(**{"ranks": each, "micro_batch": 2, "precision": "fp64", "stages": (stage,), **changes})


def train(recipe: Any, plan: plans.Plan, table: Any = table.TABLE) -> tuple[list[float], dict[str, float]]:
    """Losses of the steps and of the validation, and the bytes that rank 0 sent in its last step."""
    workload = open_language(recipe)

    def life(place: launch.RankSpec) -> tuple[list[float], dict[str, float]]:
        seen: list[float] = []
        sent: dict[str, float] = {}

        def emit(event: str, **fields: Any) -> None:
            if event in ("step", "validation"):
                seen.append(fields["loss"])
            if event == "step":
                sent.update(fields["bytes"])

        with worker.joined(place, 90.0) as channel:
            trainer.Trainer(RankSetup(recipe, plan, workload, place, emit=emit), channel, table).run()
        return seen, sent

    places = launch.places(plan)
    return agent.run(life, places)[0] if len(places) > 1 else life(places[0])


@pytest.fixture(scope="module")
def whole(corpus: Path) -> list[float]:
    return train(recipe_of(corpus), plan_of(1))[0]


def test_ranks_of_unequal_speeds_share_tokens_and_heads(corpus: Path, whole: list[float]) -> None:
    found, _ = train(recipe_of(corpus), plan_of(4, (2, 2, 2), (3.0, 1.0, 1.0, 1.0)))
    assert found == pytest.approx(whole, rel=1e-9)


def test_what_queries_are_multiplied_by_goes_with_their_positions(corpus: Path) -> None:
    recipe = recipe_of(corpus, "positions")
    expected = train(recipe, plan_of(1))[0]
    assert train(recipe, plan_of(2, (1, 2, 1)))[0] == pytest.approx(expected, rel=1e-9)
    assert expected != pytest.approx(train(recipe_of(corpus), plan_of(1))[0], rel=1e-6)


def test_a_run_goes_on_under_another_cut(corpus: Path, whole: list[float], tmp_path: Path) -> None:
    """Interrupted after two steps; the checkpoint holds whole tensors."""
    recipe, seen = recipe_of(corpus), []
    for number, (cut, stop) in enumerate((((1, 2, 2), 2), ((2, 1, 1), 4), ((1, 1, 1), None))):

        def life(place: launch.RankSpec, cut: Any = cut, stop: Any = stop) -> list[float]:
            found: list[float] = []

            def emit(event: str, **fields: Any) -> None:
                if event in ("step", "validation"):
                    found.append(fields["loss"])

            with worker.joined(place, 90.0) as channel:
                plan, workload = plan_of(cut[0] * cut[1], cut), open_language(recipe)
                one = trainer.Trainer(
                    RankSetup(recipe, plan, workload, place, tmp_path, emit, stop_after=stop), channel
                )
                saved = Checkpoints(tmp_path / "checkpoints", keep=2, group=worker.saving_group(channel))
                one.restore(saved)
                with contextlib.suppress(Interrupted):
                    one.run(saved)
            return found

        seen += agent.run(life, launch.places(plan_of(cut[0] * cut[1], cut)))[0]
        assert len(seen) == (2, 4, STEPS + 1)[number]
    assert seen == pytest.approx(whole, rel=1e-9)


def sharded(*factors: int) -> tuple[plans.Unit, ...]:
    """States over so many of the ranks that hold the same parameters, the first of them."""
    groups = (tuple(range(factor)) if factor > 1 else () for factor in factors)
    return (plans.Unit(**dict(zip(("params", "grads", "optimizer"), groups, strict=True))),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [(2, 2, 2), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 4, 2), (4, 1, 1), (2, 1, 1), (1, 2, 2)))],
    ids=str,
)
def test_weights_are_sharded_over_ranks_of_their_own_number(
    corpus: Path, whole: list[float], cut: tuple[int, int, int]
) -> None:
    """Over 1, 2 or 4 of four ranks, whether these share one sequence or two: neither degree asks for the other."""
    recipe, (heads, context, window) = recipe_of(corpus), cut
    machine = cluster.loads('[[nodes]]\ndevice = "cpu"\ncores = 4\nmemory = "8GiB"\n')
    request = resolve_recipe.request(Resolved(recipe))
    for factors in ((1, 1, 1), (2, 2, 2), (4, 4, 4), (2, 2, 4)):
        found, sent = train(recipe, plan_of(4, cut, units=sharded(*factors), placement="context_first"))
        assert found == pytest.approx(whole, rel=1e-9), factors
        states = dict(zip(("params", "grads", "optimizer"), factors, strict=True))
        dp = 4 // (heads * context)
        layout = Layouts("isp", dp=dp, hp=heads, cp=context, window=window, micro_batch=2, **states)
        wanted = estimate(request, machine, layout).sent_bytes
        for name in ("gradients", "parameters"):
            assert sent.get(name, 0) == wanted.get(name, 0), (factors, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "mode", ["block", *(pytest.param(one, marks=pytest.mark.slow) for one in ("none", "selective"))]
)
def test_when_weights_are_gathered_changes_neither_results_nor_bytes(corpus: Path, mode: str) -> None:
    recipe = recipe_of(corpus)
    seen = [
        train(recipe, plan_of(2, (2, 1, 1), units=sharded(2, 2, 2), recompute=mode, prefetch=prefetch))
        for prefetch in ("block", "attention", "none")
    ]
    assert seen[0] == seen[1] == seen[2]


def test_the_balance_of_experts_is_that_of_whole_sequences(corpus: Path) -> None:
    recipe = recipe_of(corpus, "moe")
    assert train(recipe, plan_of(4, (2, 2, 2)))[0] == pytest.approx(train(recipe, plan_of(1))[0], rel=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("cut", "mode"), [((1, 4, 2), "none"), ((4, 1, 1), "block"), ((1, 2, 2), "block"), ((2, 2, 1), "selective")]
)
def test_the_bytes_of_a_step_are_those_of_the_formula(corpus: Path, cut: tuple[int, int, int], mode: str) -> None:
    """Of lengths and heads that the degrees divide, over all layers and micro-batches."""
    recipe = recipe_of(corpus, sequence=64, batch_tokens=256, validate_every=1000)
    heads, context, window = cut
    _, sent = train(recipe, plan_of(4, cut, recompute=mode))
    load = SequenceLoad(heads * context * 64, 4, 2, 8, layers=2, element_bytes=8, recompute=mode)
    wanted = cost(load, SequenceGrid(heads, context, window)).sent
    assert sent.get("keys_values", 0) == wanted["keys_values"]
    assert sent.get("activations", 0) == wanted["activations"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("codec", "bound", "share"), [("split", 1e-9, 1.0), ("int8", 2e-3, 0.5)])
def test_keys_and_values_travel_encoded_where_the_plan_says_so(
    corpus: Path, codec: str, bound: float, share: float
) -> None:
    """A lossless codec changes nothing but the order of sums; int8 stays close, and sends a fraction of the bytes."""
    recipe = recipe_of(corpus, sequence=256, batch_tokens=1024, validate_tokens=512)
    exchange = plans.Exchange(traffic="keys_values", codec=codec)
    exact, sent = train(recipe, plan_of(2, (1, 2, 2)))
    found, less = train(recipe, plan_of(2, (1, 2, 2), exchanges=(exchange,)))
    assert found == pytest.approx(exact, rel=bound)
    assert less["keys_values"] < share * sent["keys_values"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_what_a_compiler_makes_of_the_blocks_leaves_the_rings_alone(corpus: Path, whole: list[float]) -> None:
    found, _ = train(recipe_of(corpus), plan_of(2, (1, 2, 2), compile=True))
    assert found == pytest.approx(whole, rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_a_gather_begins_inside_a_compiled_block(corpus: Path, whole: list[float]) -> None:
    plan = plan_of(2, (2, 1, 1), units=sharded(2, 2, 2), prefetch="attention", recompute="block", compile=True)
    found, _ = train(recipe_of(corpus), plan)
    assert found == pytest.approx(whole, rel=1e-9)


# --- packed documents ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    for number in range(120):
        (folder / f"{number}.txt").write_text(f"{number} and {number * 7}" + number % 5 * " more")
    return folder


@pytest.mark.parametrize("model", list(MODELS))
def test_packed_documents_equal_documents_one_by_one(short_documents: Path, model: str) -> None:
    """Their losses and gradients add up. The penalty of uneven experts is of windows, so the router's is left out."""
    workload = open_language(recipe_of(short_documents, model, packing="documents", sequence=96, batch_tokens=192))
    built = workload.build(torch.device("cpu"), torch.float64).eval()
    (batch,) = workload.batches(0, Shard(0, 2, 2))
    assert batch.where is not None
    assert batch.where.documents is not None
    workload.loss(built, batch)[0].backward()
    found = {name: value.grad.clone() for name, value in built.named_parameters() if value.grad is not None}
    built.zero_grad()
    apart = 0
    for tokens, targets, documents in zip(batch.tokens, batch.targets, batch.where.documents, strict=True):
        for label in documents.unique():
            own = documents == label
            workload.loss(built, TokenWindows(tokens[None, own], targets[None, own]))[0].backward()
            apart += 1
    assert apart > 6
    for name, value in built.named_parameters():
        torch.testing.assert_close(value.grad, found.get(name), rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["gpt", "window", "caps"])
def test_packed_documents_train_as_under_a_mask(short_documents: Path, model: str) -> None:
    """That of PyTorch's attention, also where the model sees a window of its document or caps its scores."""
    recipe = recipe_of(short_documents, model, "documents", sequence=96, batch_tokens=4 * 96, validate_tokens=192)
    plain = [row for row in table.TABLE if "attention_2d" not in getattr(row, "module", "")]
    assert train(recipe, plan_of(1))[0] == pytest.approx(train(recipe, plan_of(1), plain)[0], rel=1e-9)


def test_a_document_longer_than_the_sequence_is_split_and_that_is_said(corpus: Path, short_documents: Path) -> None:
    """Its parts are documents of their own; where all documents fit, nothing is said."""
    workload = open_language(recipe_of(corpus, packing="documents"))
    split, (*_, note) = workload.stores[0].train, workload.notes()
    count = split.documents
    assert note.startswith(f"{count} of {count} documents have more than train.sequence = 37 tokens in")
    longest = max(len((corpus / name).read_bytes()) for name in split.documents_in(0, split.tokens)) + 1
    assert f"(the longest {longest})" in note
    (batch,) = workload.batches(0, Shard(0, 4, 4))
    assert batch.where is not None
    for row, positions in zip(batch.tokens, batch.where.positions, strict=True):
        if workload.tokenizer.boundary not in row:
            assert positions.tolist() == list(range(37))
    fitting = recipe_of(short_documents, packing="documents", sequence=96, batch_tokens=4 * 96)
    for recipe in (fitting, recipe_of(corpus)):
        assert "train.sequence" not in " ".join(open_language(recipe).notes())


def test_sources_that_differ_in_packing_are_refused(corpus: Path) -> None:
    recipe = recipe_of(corpus)
    both = msgspec.structs.replace(
        recipe, data=(*recipe.data, msgspec.structs.replace(recipe.data[0], packing="documents"))
    )
    with pytest.raises(UserError, match="differ in packing"):
        open_language(both)


def test_more_ranks_than_heads_are_refused_before_the_first_step(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(*given: Any) -> Any:
        raise AssertionError("a step has begun")

    monkeypatch.setattr(LanguageWorkload, "loss", loss)
    stage = plans.Stage(ranks=tuple(range(6)), layers=(0, 2), tensor=2, heads=3)
    shared = plans.Plan(ranks=(plans.Rank(share=(0, 4)),) * 6, micro_batch=2, precision="fp64", stages=(stage,))
    for plan, said in ((plan_of(6, (6, 1, 1)), "hp = 6 is too much for 4 heads"), (shared, "hp = 3 is too much for 2")):
        with pytest.raises(UserError, match=said):
            train(recipe_of(corpus), plan)


def test_replicas_that_agree_by_rounds_may_share_sequences(corpus: Path) -> None:
    """Two replicas of two ranks have the losses of two replicas of one."""

    def plan(context: int) -> plans.Plan:
        ranks = tuple(plans.Rank(share=share) for share in ((0, 2), (2, 4)) for _ in range(context))
        replicas = tuple(tuple(range(start, start + context)) for start in (0, context))
        stage = plans.Stage(ranks=replicas[0], layers=(0, 2), context=context)
        outer = LocalRoundsState(replicas=replicas, method="co2", steps=2, adapt=False)
        unit = plans.Unit(optimizer=replicas[0] if context > 1 else ())
        how = {"micro_batch": 2, "precision": "fp64"}
        return plans.Plan(ranks=ranks, units=(unit,), stages=(stage,), choices={"local_rounds": outer}, **how)

    recipe = recipe_of(corpus, steps=4)
    assert train(recipe, plan(2))[0] == pytest.approx(train(recipe, plan(1))[0], rel=1e-9)
