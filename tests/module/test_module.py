"""A foreign module: whatever its author's code does wrong is said with its line, before a run begins or during it."""

from __future__ import annotations

import sys

import pytest
import torch

from espalier import recipe as config
from espalier.module import ModuleWorkload, open_module
from espalier.parallel.workload import Shard
from espalier.recipe import defaults
from espalier.recipe.errors import RunFailed, UserError

GOOD = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

def pairs(count):
    return TensorDataset(torch.arange(2.0 * count).view(count, 2), torch.arange(float(count)))

def squares(model, batch):
    x, y = batch
    return (model(x)[:, 0] - y).square().sum(), torch.tensor(len(y))

class Failing(Dataset):
    def __init__(self, first):
        self.first = first
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index >= self.first:
            raise KeyError("no such sample")  # line 20
        return torch.zeros(2), torch.zeros(())

class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), torch.zeros(())

def build(depth=1):
    torch.manual_seed(0)
    return nn.Linear(2, 1), pairs(8), squares, pairs(4)
"""


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens a module whose code is GOOD and then `more`, as the recipe of that folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def do(more: str = "", name: str = "build", code: str = GOOD, **arguments: bool | int | float | str):
        file = tmp_path / "theirs.py"
        file.write_text(code + more)
        sys.modules.pop("theirs", None)
        sys.path_importer_cache.clear()
        model = config.Module(build=f"theirs:{name}", arguments=arguments)
        recipe = config.Recipe(model=model, train=config.Train(steps=4, batch_tokens=4))
        return open_module(defaults.resolve(recipe)[0], tmp_path)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield do
    sys.modules.pop("theirs", None)


def refused(opened, *names: str, **how) -> str:
    with pytest.raises(UserError) as error:
        opened(**how)
    for name in ("model.build = 'theirs:", *names):
        assert name in str(error.value)
    return str(error.value)


QUIET = """
def quiet():
    return nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 1)), pairs(8), squares
"""


def test_the_trial_leaves_no_trace(opened):
    torch.manual_seed(5)
    torch.nn.Linear(2, 1)
    after_build = torch.rand(1)
    torch.manual_seed(5)
    workload = opened(QUIET, name="quiet")
    assert isinstance(workload, ModuleWorkload)
    assert torch.equal(torch.rand(1), after_build)
    assert int(workload.parts.model[0].num_batches_tracked) == 0
    assert workload.parts.model[0].running_mean.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        ("ValueError('odd')", "ValueError: odd"),
        ("SystemExit(3)", "SystemExit: 3"),
        ("OSError(2, 'No such file', 'w.pt')", "w.pt"),
        ("TypeError('of their own')", "TypeError: of their own"),
        ("StopIteration", "StopIteration"),
    ],
)
def test_what_build_raises_is_said_with_its_line(opened, raised, says):
    line = GOOD.count("\n") + 3
    refused(opened, says, f"theirs.py:{line}", more=f"\ndef bad():\n    raise {raised}\n", name="bad")


@pytest.mark.parametrize(
    ("code", "says", "line"),
    [
        ("x = 1\ndef build(:\n", "SyntaxError", 2),
        ("x = 1\n\nraise SystemExit('bye')\n", "SystemExit: bye", 3),
        ("import not_there_at_all\n", "No module named 'not_there_at_all'", 1),
        ("open('/nowhere/at/all')\n", "/nowhere/at/all", 1),
    ],
)
def test_what_importing_raises_is_said_with_its_line(opened, code, says, line):
    refused(opened, says, "when it was imported", f"theirs.py:{line}", code=code)


def test_a_module_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    recipe = config.Recipe(model=config.Module(build="absent.inner:build"))
    with pytest.raises(UserError, match="beside the recipe, or install") as error:
        open_module(recipe, tmp_path)
    assert str(tmp_path) in str(error.value)


def test_arguments_that_do_not_fit_are_said_to_be_refused(opened):
    refused(opened, "refused model.arguments", "'width'", width=3)


def made(parts: str) -> str:
    return f"\ndef bad():\n    return {parts}\n"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ("nn.Linear(2, 1)", "returned Linear"),
        ("nn.Linear(2, 1).requires_grad_(False), pairs(8), squares", "without a trainable parameter"),
        ("nn.ReLU(), pairs(8), squares", "without a trainable parameter"),
        ("nn.Linear(2, 1), pairs(0), squares", "empty dataset"),
        ("nn.Linear(2, 1), Endless(), squares", "Endless has no length"),
        ("nn.Linear(2, 1), pairs(8), squares, Endless()", "Endless has no length"),
        ("nn.Linear(2, 1), Failing(0), squares", "theirs.py:20"),
        ("nn.Linear(2, 1), pairs(8), squares, Failing(0)", "KeyError: 'no such sample'"),
        ("nn.Linear(2, 1), [None] * 8, squares", "while its dataset was read"),
        ("nn.Linear(3, 1), pairs(8), squares", "theirs.py:11"),
        ("nn.Linear(2, 1), pairs(8), 7", "not callable"),
        ("nn.Linear(2, 1), pairs(8), lambda model, batch: exit(1)", "SystemExit: 1"),
        ("nn.Linear(2, 1), pairs(8), lambda model, batch: squares(model, batch)[0]", "its loss returned a tensor"),
        ("nn.Linear(2, 1), pairs(8), lambda model, batch: None", "its loss returned NoneType"),
        ("nn.Linear(2, 1), pairs(8), lambda model, batch: (model(batch[0]), torch.tensor(2))", "shape [2, 1]"),
        ("nn.Linear(2, 1), pairs(8), lambda model, batch: (model(batch[0]).sum(), 2)", "int)"),
        ("nn.Linear(2, 1), pairs(8), lambda model, batch: (torch.tensor(1.0), torch.tensor(2))", "without gradient"),
    ],
)
def test_parts_that_cannot_be_trained_are_refused_before_a_run(opened, parts, says):
    refused(opened, says, more=made(parts), name="bad")


@pytest.mark.parametrize("weight", ["len(batch[1])", "1"])
def test_a_loss_that_is_a_mean_is_refused(opened, weight):
    mean = f"lambda model, batch: (squares(model, batch)[0] / len(batch[1]), torch.tensor({weight}))"
    for model in ("nn.Linear(2, 1)", "nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))"):
        refused(opened, "for both twice", 'reduction="sum"', more=made(f"{model}, pairs(8), {mean}"), name="bad")


def test_samples_of_double_precision_are_tried_as_they_are_trained(opened):
    opened(made("nn.Linear(2, 1), TensorDataset(torch.zeros(4, 2).double(), torch.zeros(4).double()), squares"), "bad")


def test_what_goes_wrong_later_is_said_too(opened):
    workload = opened(made("nn.Linear(2, 1), Failing(2), squares, Failing(3)"), "bad")
    model = workload.build(torch.device("cpu"), torch.float32)
    for use in (
        lambda: workload.batches(0, Shard(0, 4, 4)),
        lambda: workload.evaluate(model, Shard(0, 4, 2)),
        workload.fingerprint,
    ):
        with torch.no_grad(), pytest.raises(UserError, match=r"no such sample(.|\n)*theirs\.py:20"):
            use()
    with pytest.raises(UserError, match=r"in its loss(.|\n)*theirs\.py:11"):
        workload.loss(model, (torch.zeros(1, 5), torch.zeros(1)))


def test_our_own_errors_and_ctrl_c_pass_unchanged(opened):
    workload = opened()
    for error in (RunFailed("a rank died"), KeyboardInterrupt()):

        def loss(model, batch, error=error):
            raise error

        workload.parts = workload.parts._replace(loss=loss)
        with pytest.raises(type(error)):
            workload.loss(workload.parts.model, None)


def test_the_module_beside_the_recipe_comes_before_the_one_in_the_current_folder(opened, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "theirs.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.chdir(here)
    sys.path.insert(0, str(here))
    opened()
    assert sys.path[:2] == [str(tmp_path.resolve()), str(here)]


ACCURATE = """
def accuracy(model, batch):
    x, y = batch
    off = (model(x)[:, 0] - y).abs()
    return {"near": (off.lt(3).sum(), len(y)), "error": (off.sum(), len(y))}

def measured():
    return Parts(nn.Linear(2, 1), pairs(8), squares, pairs(4), metrics=accuracy)

def two():
    one = Task(pairs(8), squares, pairs(4), metrics=accuracy)
    return Parts(nn.Linear(2, 1), tasks={"a": one, "b": Task(pairs(8), squares, pairs(2))})
"""
IMPORTED = "from espalier.module import Parts, Task\n" + GOOD


def test_metrics_of_its_own_are_those_of_the_whole_held_out_dataset(opened):
    """In micro-batches and over ranks that have uneven shares, or none."""
    workload = opened(ACCURATE, "measured", IMPORTED)
    model = workload.build(torch.device("cpu"), torch.float32)
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4.0)
    off = (model(x)[:, 0] - y).abs().detach()
    whole = workload.evaluate(model, Shard(0, 4, 4))
    assert whole["near"] == (float(off.lt(3).sum()), 4)
    assert whole["error"] == pytest.approx((float(off.sum()), 4))
    parts = [workload.evaluate(model, Shard(start, stop, 1)) for start, stop in ((0, 1), (1, 4), (4, 4))]
    assert all(list(part) == ["loss", "near", "error"] for part in parts)
    for name, (total, weight) in whole.items():
        assert sum(part[name][0] for part in parts) == pytest.approx(total)
        assert sum(part[name][1] for part in parts) == weight


def test_metrics_of_one_of_two_tasks_bear_its_name(opened):
    workload = opened(ACCURATE, "two", IMPORTED)
    found = workload.evaluate(workload.build(torch.device("cpu"), torch.float32), Shard(0, 4, 1))
    assert set(found) == {"loss", "tasks.a", "tasks.b", "a.near", "a.error"}
    assert found["loss"][0] == pytest.approx(found["tasks.a"][0] + found["tasks.b"][0])
    assert found["a.near"][1] == 4


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("torch.ones(())", "a tensor of shape"),
        ("{'loss': (1.0, 1)}", "called 'loss'"),
        ("{'x': 1.0}", "(sum over the batch"),
    ],
)
def test_metrics_that_cannot_be_added_up_are_refused(opened, returned, named):
    code = (
        f"def build():\n    return Parts(nn.Linear(2, 1), pairs(8), squares, metrics=lambda model, batch: {returned})\n"
    )
    refused(opened, named, more=code, code=IMPORTED)
