"""Reading recipes: any TOML loads or gives the user error, what is written reads back, every mistake is named."""

from __future__ import annotations

import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier import recipe as config
from espalier.recipe import recipe_errors, recipe_file, value_ranges
from espalier.recipe.errors import UserError

LEAST = {"model": {"kind": "gpt"}}
KEYS = recipe_errors.known_keys()
WORDS = sorted({part for key in KEYS for part in key.split(".")})

scalars = (
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.sampled_from(["gpt", "moe", "module", "muon", "adamw", "stable", "cosine", "fp32", "none", "a:b", "5ms"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe's table, mostly of known keys with any value."""
    table: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from([*KEYS, "train.step", "modle.depth"]), max_size=6)):
        node = table
        *above, last = key.split(".")
        for part in above:
            node = node.setdefault(part, {}) if isinstance(node.get(part, {}), dict) else {}
        node[last] = draw(values)
    return table


@st.composite
def recipes(draw: st.DrawFn) -> config.Recipe:
    """A recipe that loads."""
    number = st.none() | st.integers(1, 10**6)
    name = st.text(max_size=12)
    model = draw(
        st.builds(config.Gpt, depth=number, width=number, shape=st.none() | name, rope_theta=st.floats(1, 1e7))
        | st.builds(config.Moe, depth=number, experts=st.integers(1, 64))
        | st.builds(
            config.Module, build=name, arguments=st.dictionaries(name, st.booleans() | st.integers(-9, 9) | name)
        )
    )
    train = st.builds(
        config.Train,
        steps=number,
        compile=st.booleans(),
        precision=st.sampled_from(["auto", "bf16", "fp16", "tf32", "fp32", "fp64"]),
        optimizer=st.builds(config.Muon) | st.builds(config.Adamw, betas=st.just((0.5, 0.75))),
        schedule=st.builds(config.Stable)
        | st.builds(config.Cosine, floor=st.floats(0, 1))
        | st.builds(config.Constant),
    )
    data = st.lists(st.builds(config.Data, path=name, weight=st.floats(0, 1e9)), max_size=3).map(tuple)
    track = st.builds(config.Track, profile=st.none() | st.just((3, 5)), sample=st.none() | name)
    return config.Recipe(model=model, data=draw(data), train=draw(train), track=draw(track), name=draw(name))


def problem(table: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        reload(table, *overrides)
    return str(error.value)


def reload(table: dict[str, Any], *overrides: str) -> config.Recipe:
    """`table` through `recipe_file.load`, by way of its text without a file."""
    table = tomllib.loads(tomli_w.dumps(table))
    return recipe_file._recipe(table, "recipe", recipe_file._overridden(table, overrides))


@given(tables())
def test_any_table_loads_or_gives_the_user_error(table: dict[str, Any]) -> None:
    try:
        recipe = recipe_file.from_table(table)
    except UserError:
        return
    assert recipe_file.from_table(tomllib.loads(recipe_file.dump(recipe))) == recipe


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text() | tables().map(tomli_w.dumps), st.lists(st.text(max_size=20), max_size=2))
def test_any_text_and_any_override_load_or_give_the_user_error(tmp_path: Path, text: str, overrides: list[str]) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text, encoding="utf-8")
    with suppress(UserError):
        recipe_file.load(file, overrides)


@given(st.sampled_from(KEYS), values)
def test_any_value_of_any_known_key_loads_or_gives_the_user_error(key: str, value: Any) -> None:
    table: dict[str, Any] = {"model": {"kind": "gpt"}, "data": {"path": "a"}}
    node = table
    *above, last = key.split(".")
    for part in above:
        node = node.setdefault(part, {})
    node[last] = value
    with suppress(UserError):
        recipe_file.from_table(table)


@given(recipes())
def test_a_recipe_that_is_written_reads_back_the_same(recipe: config.Recipe) -> None:
    back = recipe_file.from_table(tomllib.loads(recipe_file.dump(recipe)))
    assert back == recipe
    assert recipe_file.changed(recipe, back) == []


@given(recipes())
def test_any_change_of_meaning_is_seen_and_named(recipe: config.Recipe) -> None:
    other = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, seed=recipe.train.seed + 1))
    assert recipe_file.changed(recipe, other) == [("train.seed", recipe.train.seed, recipe.train.seed + 1)]
    longer = config.Data(path="more", weight=2.0)
    found = recipe_file.changed(recipe, msgspec.structs.replace(recipe, data=(*recipe.data, longer)))
    assert any(key.startswith("data") and after == "more" for key, _, after in found)


@given(recipes())
def test_what_only_says_how_a_run_is_carried_out_changes_no_meaning(recipe: config.Recipe) -> None:
    train = msgspec.structs.replace(recipe.train, steps=7, compile=not recipe.train.compile, validate_every=3)
    other = msgspec.structs.replace(
        recipe,
        name="other",
        train=train,
        plan=config.Planning(cluster="c.toml", pin=config.Pin(ranks=2)),
        checkpoint=config.Checkpoint(every=9),
        comm=config.Comm(timeout="5s"),
        track=config.Track(tensorboard=True),
    )
    assert recipe_file.changed(recipe, other) == []


def test_true_and_one_are_different_arguments() -> None:
    first, second = (config.Recipe(model=config.Module(build="a:b", arguments={"deep": value})) for value in (True, 1))
    assert recipe_file.changed(first, second) == [("model.arguments.deep", True, 1)]


@pytest.mark.parametrize("key", KEYS)
def test_a_slip_in_any_known_key_is_an_error_that_names_it(key: str) -> None:
    *above, last = key.split(".")
    slip = [*above, last[0] + last if last[-1].isdigit() else last + last[-1]]
    table: dict[str, Any] = {"model": {"kind": "gpt"}, "data": {"path": "a"}}
    owners = {"model.experts": "moe", "model.active": "moe", "model.balance": "moe"}
    owners |= {"model.build": "module", "model.arguments": "module"}
    owners |= {f"model.{name}": "gcn" for name in ("activation", "k", "dropout", "norm")}
    of_nodes = ("encodings", "encoding_size", "distance", "virtual", "expander", "path", "attention", "interleave")
    owners |= {f"model.{name}": "graph-transformer" for name in of_nodes}
    if key in owners:
        table["model"] = {"kind": owners[key]}
    if key.startswith("train.optimizer.") and last in ("betas", "epsilon") and "adamw" not in above:
        table["train"] = {"optimizer": {"kind": "adamw"}}
    if key.startswith("train.schedule."):
        table["train"] = {"schedule": {"kind": "cosine" if last != "decay" else "stable"}}
    node = table
    for part in slip[:-1]:
        node = node.setdefault(part, {})
    node[slip[-1]] = 1
    said = problem(table)
    assert ".".join(slip) in said
    pairs = {f"plan.pin.{one}pp": (f"plan.pin.{one}p", "plan.pin.pp") for one in "cdeh"}  # as near the one as the other
    near = pairs.get(".".join(slip), (key,))
    assert any(f"did you mean {one}?" in said for one in near) or (last == "kind" and "did you mean" in said)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=many", "on the command line: train.steps: expected int, got 'many'"),
        ("train.steps=1.5", "train.steps: expected int, got 1.5"),
        ("train.compile=1", "train.compile: expected bool, got 1"),
        ("model.depth=[1]", "model.depth: expected int, got [1]"),
        ("data=3", "data: expected array, got 3"),
        ("train=3", "train: expected object, got 3"),
        ("track.profile=[1]", "track.profile: expected array of length 2, got [1]"),
        ("train.optimizer={kind='adamw',betas=[0.9,'x']}", "on the command line: train.optimizer.betas"),
        ("train.precision=fp8", "training in fp8 is not there yet"),
        ("train.precision=fp8", 'train.precision = "bf16"'),
        ("train.precision=float16", 'train.precision = "fp16"'),
        ("train.recompute=blok", 'train.recompute = "block"'),
        ("model.kind=gtp", 'model.kind = "gpt"'),
        ("model.kind=3", "model.kind = 3 is not a choice"),
        ("train.optimizer=adam", 'train.optimizer.kind = "adamw"'),
        ("model.experts=4", 'model.kind = "moe", or leave experts out'),
        ("steps=5", "did you mean train.steps?"),
        ("comm.codecs.ratio=0.05", "unknown key comm.codecs"),
        ("train.clip=nan", "train.clip is not a number"),
        ("train.seed=0x10000000000000000", "more than 64 bits"),
        ("track.sample=\udcff", "not UTF-8"),
        ("train.steps.more=1", "it is a value, not a table"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_something_to_try(override: str, says: str) -> None:
    assert says in problem({**LEAST, "train": {"steps": 5}}, override)


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=3", ".=1", ""])
def test_what_is_not_an_override_is_refused(override: str) -> None:
    assert "write key=value" in problem(LEAST, override)


def test_overrides_win_in_their_order_and_are_read_as_toml_or_as_text() -> None:
    recipe = reload(LEAST, "train.steps=5", "train.steps=6", "data.path=python:stdlib", 'name="a b"', "model.tied=true")
    assert (recipe.train.steps, recipe.data[0].path, recipe.name, recipe.model.tied) == (
        6,
        "python:stdlib",
        "a b",
        True,
    )
    assert reload(LEAST, "name=1\nx = 2").name == "1\nx = 2"


def test_an_override_reaches_into_the_only_source_but_not_into_one_of_several() -> None:
    one = {**LEAST, "data": {"path": "a"}}
    assert reload(one, "data.weight=2.0").data == (config.Data(path="a", weight=2.0),)
    assert "it stands for several tables" in problem({**LEAST, "data": [{"path": "a"}, {"path": "b"}]}, "data.weight=2")


def test_a_choice_may_be_named_by_its_kind_alone() -> None:
    recipe = reload({"model": "gpt"}, "train.schedule=cosine", "train.schedule.floor=0.5", "train.optimizer=adamw")
    assert recipe.train.schedule == config.Cosine(floor=0.5)
    assert isinstance(recipe.train.optimizer, config.Adamw)
    assert isinstance(reload({"model": {"build": "a:b"}}).model, config.Module)


def test_the_second_of_several_sources_is_named() -> None:
    assert "data[1].path" in problem({**LEAST, "data": [{"path": "a"}, {"path": 3}]})
    assert "did you mean data.path?" in problem({**LEAST, "data": [{"path": "a"}, {"pth": "b"}]})


def test_a_recipe_without_a_model_means_the_plain_decoder() -> None:
    assert recipe_file.from_table({}) == config.Recipe(model=config.Gpt())
    assert reload({}, "model.depth=3").model == config.Gpt(depth=3)


def test_a_wrong_value_in_the_file_is_shown_and_not_blamed_on_the_command_line() -> None:
    said = problem({"train": {"steps": "abc"}}, "train.seed=3")
    assert "recipe: train.steps: expected int, got 'abc'." in said
    assert "data[1].path: expected str, got 3" in problem({"data": [{"path": "a"}, {"path": 3}]})
    assert len(problem({"train": {"steps": "x" * 5000}})) < 300


def test_a_size_on_the_command_line_takes_the_place_of_the_one_in_the_file() -> None:
    by_depth, by_shape = {"model": {"depth": 3}}, {"model": {"shape": "gpt2-124m"}}
    assert reload(by_depth, "model.shape=llama-7b").model == config.Gpt(shape="llama-7b")
    assert reload(by_shape, "model.depth=5").model == config.Gpt(depth=5)
    both = reload(by_depth, "model.shape=llama-7b", "model.depth=5").model
    assert both == config.Gpt(shape="llama-7b", depth=5)
    assert reload({"model": {"depth": 3, "shape": "x"}}, "train.steps=5").model == config.Gpt(depth=3, shape="x")


def test_files_that_cannot_be_read_are_the_users_mistake(tmp_path: Path) -> None:
    def said(content: bytes | None, name: str = "recipe.toml") -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as error:
            recipe_file.load(tmp_path / name)
        return str(error.value)

    assert "absent.toml cannot be read: it is not there" in said(None, "absent.toml")
    assert "not UTF-8" in said(b"name = '\xff'")
    assert "not valid TOML" in said(b"name = ")
    assert "not valid TOML" in said(b"name = " + b"1" * 5000)
    assert "too deeply" in said(b"x = " + b"[" * 5000)
    assert "unknown key a" in said(b"a" + b".a" * 3000 + b" = 1")
    with pytest.raises(UserError, match="is a folder, not a recipe"):
        recipe_file.load(tmp_path)


def test_the_file_gives_the_run_its_name(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("[model]\nkind = 'gpt'\n")
    assert recipe_file.load(tmp_path / "small.toml").name == "small"
    assert recipe_file.load(tmp_path / "small.toml", ["name=other"]).name == "other"


def test_known_keys_are_the_leaves_of_the_tree() -> None:
    assert {"model.kind", "model.experts", "data.path", "train.optimizer.adamw.betas", "plan.pin.ranks"} <= set(KEYS)
    assert sorted(set(KEYS)) == KEYS
    assert not any(other.startswith(key + ".") for key in KEYS for other in KEYS)


NAMES = [
    "../../x", "/x", "a/b", "", ".", "..", ".x", "-x", " x", "x ", "a\nb", "\x1b[1m", "$(x)", "a;b", "@COMMAND@", "a\0",
    "\u202ex", "a" * 201, "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 67, "'", "<b>",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_more_than_a_name_is_refused_with_one_that_is_not(name: str) -> None:
    recipe = reload(LEAST, f"name={json.dumps(name)}")
    with pytest.raises(UserError) as caught:
        value_ranges.check(recipe)
    assert repr(name) in caught.value.what
    assert "--run FOLDER" in caught.value.do
    value_ranges.check(reload(LEAST, caught.value.do.partition(";")[0].replace(" = ", "=")))


@pytest.mark.parametrize("name", ["a b", "run_2-x.y", "größe", "中文", "e\u0301", "\u0928\u093f", "a..b", "x" * 200])
def test_names_in_any_script_are_possible(name: str) -> None:
    value_ranges.check(reload(LEAST, f"name={json.dumps(name)}"))


@given(st.text(st.characters(codec=None)))
def test_the_plain_form_of_any_text_is_a_name_and_one_part_of_a_path(text: str) -> None:
    name = recipe_file.plain_name(text)
    assert recipe_file.plain_name(name) == name
    assert Path("runs", name).resolve().parent == Path("runs").resolve()
    assert name.isprintable()


def test_a_recipe_is_called_as_its_file_as_far_as_that_is_a_name(tmp_path: Path) -> None:
    file = tmp_path / "-my (new);recipe.toml"
    file.write_text(tomli_w.dumps(LEAST))
    assert recipe_file.load(file).name == "my -new--recipe"


@pytest.mark.parametrize("python", ["", "-c", "a\nb"])
def test_an_interpreter_is_a_program(python: str) -> None:
    with pytest.raises(UserError, match=r"launch\.python"):
        value_ranges.check(reload(LEAST, f"launch.python={json.dumps(python)}"))


def test_one_of_several_tables_is_changed_or_left_out_by_its_name(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "examples" / "tasks.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text)

    def tasks(*overrides: str) -> dict[str, float]:
        found = recipe_file.load(tmp_path / "recipe.toml", overrides).tasks
        return {one.name: one.weight for one in found or ()}

    assert tasks("tasks.source.weight=0.25") == {**tasks(), "source": 0.25}
    assert tasks("tasks.source=none") == {name: weight for name, weight in tasks().items() if name != "source"}
    with pytest.raises(UserError, match="tasks has no such part") as caught:
        tasks("tasks.sorce.weight=2")
    assert all(name in str(caught.value) for name in ("glyphs", "source", "packages"))
    with pytest.raises(UserError, match=r"tasks\.source is a table"):
        tasks("tasks.source=2")
