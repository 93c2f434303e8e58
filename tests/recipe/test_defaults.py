"""What a recipe leaves open is filled with a reason; what does not fit is refused by name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier import recipe as config
from espalier.recipe import decoder_shapes, defaults, recipe_file
from espalier.recipe.errors import UserError


def recipe(model=None, **train) -> config.Recipe:
    return config.Recipe(model=model or config.Gpt(), train=config.Train(**train))


def none_left(struct, path="") -> list[str]:
    """Dotted keys that are still None among those that resolve has to fill."""
    off = {
        "head_size",
        "window",
        "attention_cap",
        "logit_cap",
        "attention_scale",
        "rope",
        "local_theta",
        "max_iterations",
    }  # None: as in Llama
    free = {"model.shape", "model.initial", "model.layers", *(f"model.{name}" for name in off)}
    names = [f"{path}{name}" for name in struct.__struct_fields__]
    found = []
    for key in names:
        value = getattr(struct, key.split(".")[-1])
        if isinstance(value, msgspec.Struct):
            found += none_left(value, key + ".")
        elif value is None and key not in free:
            found.append(key)
    return found


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 96),
    kind=st.sampled_from([config.Gpt, config.Moe]),
    optimizer=st.sampled_from([config.Muon(), config.Adamw()]),
    sequence=st.none() | st.integers(1, 5000),
    steps=st.none() | st.integers(1, 10**6),
)
def test_every_option_is_filled_and_resolving_again_changes_nothing(depth, kind, optimizer, sequence, steps):
    resolved, found = defaults.resolve(recipe(kind(depth=depth), optimizer=optimizer, sequence=sequence, steps=steps))
    assert none_left(resolved.model, "model.") == []
    assert none_left(resolved.train, "train.") == ["train.recompute"]  # the planner's to choose
    assert resolved.checkpoint.every == "auto"
    assert resolved.train.batch_tokens % resolved.train.sequence == 0
    assert all(derivation.reason for derivation in found)
    assert defaults.resolve(resolved) == (resolved, [])
    assert recipe_file.from_table(recipe_file.to_table(resolved)) == resolved


def test_each_derivation_says_what_was_open_and_what_it_became():
    before = recipe(config.Gpt(depth=3, heads=6), sequence=128)
    resolved, found = defaults.resolve(before)
    for derivation in found:
        old = new = None
        for name in derivation.key.split("."):
            old = getattr(before if old is None else old, name)
            new = getattr(resolved if new is None else new, name)
        assert old is None
        assert new == derivation.value
    assert not {"model.depth", "model.heads", "train.sequence"} & {derivation.key for derivation in found}


def test_depth_3_is_192_wide_with_heads_of_64():
    model = defaults.resolve(recipe(config.Gpt(depth=3)))[0].model
    assert (model.width, model.heads, model.kv_heads, model.feed_forward) == (192, 3, 3, 512)
    assert model.vocabulary == 256


def test_neither_depth_nor_shape_means_depth_4():
    assert defaults.resolve(recipe())[0].model.depth == 4


@pytest.mark.parametrize("name", list(decoder_shapes.SHAPES))
def test_a_shape_gives_what_the_recipe_does_not(name):
    published = decoder_shapes.SHAPES[name]
    resolved = defaults.resolve(recipe(config.Gpt(shape=name, vocabulary=1000)))[0].model
    assert (resolved.depth, resolved.width, resolved.kv_heads) == (published.depth, published.width, published.kv_heads)
    assert resolved.vocabulary == 1000


@pytest.mark.parametrize(
    ("name", "published"),
    # Parameters as counted in the released weights.
    [
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-70b", 68_976_648_192),
        ("llama3-1b", 1_235_814_400),
        ("llama3-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("smollm2-135m", 134_515_008),
        ("tinyllama-1b", 1_100_048_384),
    ],
)
def test_shapes_count_the_published_parameters(name, published):
    assert decoder_shapes.parameter_count(defaults.resolve(recipe(config.Gpt(shape=name)))[0].model) == published


def test_mistral_with_eight_experts_is_mixtral():
    model = defaults.resolve(recipe(config.Moe(shape="mistral-7b", experts=8, active=2)))[0].model
    assert decoder_shapes.parameter_count(model) == 46_702_792_704


def test_the_beginning_of_a_shape_names_it():
    with pytest.raises(UserError) as caught:
        decoder_shapes.published("gpt2")
    assert caught.value.do == 'model.shape = "gpt2-124m"'


@pytest.mark.parametrize(
    ("name", "about"),
    [("gpt2-124m", 124e6), ("gpt2-355m", 355e6), ("gpt2-774m", 774e6), ("gpt2-1558m", 1558e6), ("gpt3-175b", 175e9)],
)
def test_gpt_shapes_come_within_half_a_percent_of_their_name(name, about):
    count = decoder_shapes.parameter_count(defaults.resolve(recipe(config.Gpt(shape=name)))[0].model)
    assert count == pytest.approx(about, rel=5e-3)


def test_a_token_passes_through_the_active_experts_only():
    model = defaults.resolve(recipe(config.Moe(depth=2, experts=8, active=2)))[0].model
    experts = model.depth * 3 * model.width * model.feed_forward
    assert decoder_shapes.parameter_count(model) - decoder_shapes.active_parameter_count(model) == 6 * experts


def test_batch_and_tokens_grow_with_the_model():
    trains = [defaults.resolve(recipe(config.Gpt(depth=depth)))[0].train for depth in (2, 4, 8, 16, 32)]
    batches = [train.batch_tokens for train in trains]
    assert batches == sorted(batches)
    assert batches[0] < batches[-1]
    rates = [train.optimizer.adamw.learning_rate for train in trains]
    assert rates == sorted(rates, reverse=True)


def test_twenty_tokens_for_each_parameter():
    resolved = defaults.resolve(recipe(config.Gpt(depth=4)))[0]
    tokens = resolved.train.steps * resolved.train.batch_tokens
    assert tokens == pytest.approx(20 * decoder_shapes.parameter_count(resolved.model), rel=0.01)


def test_a_short_run_gets_a_smaller_batch():
    long = defaults.resolve(recipe(config.Gpt(depth=4)))[0].train.batch_tokens
    assert defaults.resolve(recipe(config.Gpt(depth=4), steps=100))[0].train.batch_tokens < long


def test_another_tokenizer_fills_the_vocabulary_in_a_second_call():
    data = (config.Data(path="x", tokenizer="tokenizer.json"),)
    first, _ = defaults.resolve(config.Recipe(model=config.Gpt(depth=4), data=data))
    assert first.model.vocabulary is None
    assert first.train.steps is None
    assert first.model.width == 256
    second, found = defaults.resolve(first, vocabulary=8000)
    assert second.model.vocabulary == 8000
    assert second.model.tied is True
    assert second.train.steps > 0
    assert second == defaults.resolve(config.Recipe(model=config.Gpt(depth=4), data=data), vocabulary=8000)[0]
    assert {"model.vocabulary", "train.steps"} <= {derivation.key for derivation in found}


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    with pytest.raises(UserError, match=r"model\.vocabulary = 200"):
        defaults.resolve(config.Recipe(model=config.Gpt(vocabulary=200), data=(config.Data(path="x"),)))


def test_a_module_recipe_is_filled_too():
    resolved, _ = defaults.resolve(recipe(config.Module(build="a:b")))
    assert none_left(resolved.train, "train.") == ["train.recompute", "train.validate_tokens"]


@pytest.mark.parametrize("steps", [1, 8, 12, 19, 50, 300, 4000, 10**6])
@pytest.mark.parametrize("batch", [256, 4096, 1 << 20])
def test_validations_are_at_least_eight_and_cost_no_more_than_a_twentieth_or_one_of_64_ki_tokens(steps, batch):
    train = defaults.resolve(recipe(config.Gpt(depth=3), steps=steps, batch_tokens=batch))[0].train
    count = -(-steps // train.validate_every)
    assert count >= min(8, steps)
    assert train.validate_tokens % train.sequence == 0
    assert train.validate_tokens <= 65_536
    whole = steps * batch
    dear = max(1, 65_536 // count < train.sequence) * train.sequence  # at least one window
    assert count * train.validate_tokens / 3 <= max(0.05 * whole, 65_536 / 3, count * dear / 3)


def test_given_validation_tokens_bound_how_often_they_are_read():
    train = defaults.resolve(recipe(steps=300, batch_tokens=4096, validate_tokens=65_536))[0].train
    assert 0.045 < 65_536 / 3 / (train.validate_every * 4096) <= 0.05


def test_a_run_that_is_extended_may_validate_on_other_tokens():
    short, longer = (defaults.resolve(recipe(steps=steps, batch_tokens=4096))[0] for steps in (50, 500))
    assert short.train.validate_tokens < longer.train.validate_tokens
    assert [key for key, *_ in recipe_file.changed(short, longer)] == []


BAD = {
    "heads": config.Gpt(width=192, heads=5),
    "kv_heads": config.Gpt(width=192, heads=6, kv_heads=4),
    "odd size": config.Gpt(width=192, heads=64),
    "is odd": config.Gpt(width=97),
    "model.depth": config.Gpt(depth=0),
    "model.depth = 10001": config.Gpt(depth=10_001),
    "model.width": config.Gpt(width=-64),
    "contradict": config.Gpt(depth=3, shape="llama-7b"),
    "model.width = 64": config.Gpt(width=64, shape="llama-7b"),
    "model.kv_heads = 4": config.Gpt(kv_heads=4, shape="llama-7b"),
    'shape = "llama-7b"': config.Gpt(shape="lama-7b"),
    "model.active": config.Moe(experts=2, active=3),
    "model.experts": config.Moe(experts=0),
    "model.experts = 1": config.Moe(experts=1, active=1),
    "model.rope_theta": config.Gpt(rope_theta=float("nan")),
    "model.vocabulary": config.Gpt(vocabulary=-2),
}


@pytest.mark.parametrize("named", list(BAD))
def test_a_model_that_does_not_fit_is_refused_by_name(named):
    with pytest.raises(UserError) as refused:
        defaults.resolve(recipe(BAD[named]))
    assert named in str(refused.value)
    assert refused.value.do


@pytest.mark.parametrize(
    ("named", "train"),
    [
        ("longer than the context of the model", {"sequence": 512}),
        ("train.batch_tokens", {"sequence": 256, "batch_tokens": 1000}),
        ("train.steps", {"steps": 0}),
        ("train.sequence", {"sequence": -1}),
        ("train.clip", {"clip": float("inf")}),
        ("train.clip", {"clip": -1.0}),
        ("train.validate_every", {"validate_every": 0}),
        ("learning_rate", {"optimizer": config.Adamw(learning_rate=0.0)}),
        ("adamw.learning_rate", {"optimizer": config.Muon(adamw=config.Adamw(learning_rate=-1.0))}),
        ("adamw.learning_rate", {"optimizer": config.Muon(adamw=config.Adamw(learning_rate=101.0))}),
        ("optimizer.learning_rate", {"optimizer": config.Muon(learning_rate=1e6)}),
        ("adamw.epsilon", {"optimizer": config.Muon(adamw=config.Adamw(epsilon=0.0))}),
        ("betas", {"optimizer": config.Adamw(betas=(0.9, 1.0))}),
        ("warmup", {"schedule": config.Cosine(warmup=2.0)}),
        ("decay", {"schedule": config.Stable(warmup=0.7, decay=0.7)}),
    ],
)
def test_training_numbers_that_do_not_fit_are_refused_by_name(named, train):
    with pytest.raises(UserError, match=named):
        defaults.resolve(recipe(config.Gpt(depth=3, context=256), **train))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (config.Muon(learning_rate=3.0), "150 x the 0.02"),
        (config.Muon(learning_rate=3e-4), "0.015 x the 0.02"),
        (config.Adamw(learning_rate=1e-12), "x the 0.003"),
        (config.Muon(learning_rate=0.1), ""),
        (config.Muon(), ""),
    ],
)
def test_a_learning_rate_far_from_the_derived_one_is_said(optimizer, said):
    _, derivations = defaults.resolve(recipe(config.Gpt(depth=3), optimizer=optimizer))
    given = [each for each in derivations if each.reason.startswith("given")]
    assert [each.value for each in given] == ([optimizer.learning_rate] if said else [])
    assert said in "".join(each.reason for each in given)


@pytest.mark.parametrize("memory", [8, "8"])
def test_a_size_without_a_unit_asks_for_one(memory):
    with pytest.raises(UserError, match=r"plan\.memory.* has no unit") as refused:
        defaults.resolve(config.Recipe(model=config.Gpt(), plan=config.Planning(memory=memory)))
    assert "GiB" in refused.value.do


def test_a_clip_of_0_is_allowed_and_turns_it_off():
    assert defaults.resolve(recipe(clip=0.0))[0].train.clip == 0.0


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("plan.pin.threads = 4097", {"plan": config.Planning(pin=config.Pin(threads=4097))}),
        ("plan.pin.threads = 0", {"plan": config.Planning(pin=config.Pin(threads=0))}),
        ("track.profile = [0, 3]", {"track": config.Track(profile=(0, 3))}),
        ("track.profile = [5, 4]", {"track": config.Track(profile=(5, 4))}),
        ("would be lost with the process", {"checkpoint": config.Checkpoint(target="memory://x")}),
    ],
)
def test_what_else_cannot_be_is_refused_by_name(named, options):
    with pytest.raises(UserError) as refused:
        defaults.resolve(config.Recipe(model=config.Gpt(), **options))
    assert named in str(refused.value)


def test_the_bounds_themselves_are_allowed():
    plan, track = config.Planning(pin=config.Pin(threads=4096)), config.Track(profile=(1, 1))
    train = config.Train(optimizer=config.Adamw(learning_rate=100.0), steps=3)
    defaults.resolve(config.Recipe(model=config.Gpt(depth=2), plan=plan, track=track, train=train))


@pytest.mark.parametrize("share", [0.0, -0.1, 0.6, 1.0])
def test_the_held_out_share_is_above_0_and_at_most_a_half(share):
    data = (config.Data(path="a"), config.Data(path="b", validation=share))
    with pytest.raises(UserError, match=r"data\.validation"):
        defaults.resolve(config.Recipe(model=config.Gpt(), data=data))


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["depth", "width", "heads", "kv_heads", "feed_forward", "vocabulary", "context"]),
        st.integers(-4, 5000),
    )
)
def test_any_numbers_either_resolve_or_are_refused(numbers):
    try:
        resolved, _ = defaults.resolve(recipe(config.Gpt(**numbers)))
    except UserError:
        return
    size = decoder_shapes.sizes(resolved.model)
    assert size.head_size * size.heads == size.width
    assert size.head_size % 2 == 0
    assert size.heads % size.kv_heads == 0
    assert decoder_shapes.parameter_count(resolved.model) > 0


@pytest.mark.parametrize("optimizer", [config.Muon(), config.Adamw()])
def test_training_that_goes_on_from_weights_takes_a_tenth_of_the_rate(optimizer):
    def rates(**initial):
        derived = defaults.resolve(recipe(config.Gpt(depth=4, **initial), optimizer=optimizer))[1]
        given = [one for one in derived if one.key.endswith("learning_rate")]
        return [one.value for one in given], [one.reason for one in given]

    (scratch, _), (tenths, reasons) = rates(), rates(initial="somewhere")
    assert tenths == pytest.approx([one / 10 for one in scratch])
    assert all("model.initial" in reason for reason in reasons)
