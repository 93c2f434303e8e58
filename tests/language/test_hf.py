"""What is exported is what transformers computes with; what is loaded is what was exported."""

from __future__ import annotations

import json
import warnings

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier import recipe as config
from espalier.cli import main as cli
from espalier.language import generate, gpt, hf, moe, tokenizer
from espalier.machine import probe
from espalier.recipe import decoder_shapes, defaults
from espalier.recipe.errors import UserError


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Words:
    """A tokenizer, as far as an export cares."""

    boundary = 0

    def save(self, folder) -> None:
        (folder / "tokenizer.json").write_text("{}")


def made(kind=config.Gpt, seed=1, **changes) -> gpt.GPT:
    size = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 61, "context": 16}
    options = defaults.resolve(config.Recipe(model=kind(**{**size, **changes})))[0].model
    model = moe.MOE(options) if kind is config.Moe else gpt.GPT(options)
    gpt.initialise(model, seed)
    return model


def exported(folder, **changes):
    model = made(**changes)
    hf.export(model, Words(), folder)
    return model


def transformers_model(folder):
    with warnings.catch_warnings():
        # transformers on import and load: its own use of deprecated parts of torch and Python
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True},
        {"kv_heads": 4, "tied": False, "rope_theta": 500.0, "norm_epsilon": 1e-3},
        {"kv_heads": 1},
        {"kind": config.Moe, "experts": 4, "active": 2},
        {"kind": config.Moe, "experts": 3, "active": 1, "tied": True},
    ],
)
def test_exported_logits_equal_transformers(tmp_path, changes):
    model = exported(tmp_path / "out", **changes).eval()
    theirs = transformers_model(tmp_path / "out")
    tokens = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        left, right = model(tokens), theirs(tokens).logits
    assert left.abs().max() > 0.01
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    expected = "MixtralForCausalLM" if changes.get("kind") is config.Moe else "LlamaForCausalLM"
    assert type(theirs).__name__ == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"kind": config.Moe, "experts": 3}])
def test_loading_an_export_gives_the_same_bits_and_options(tmp_path, changes, dtype):
    model = made(**changes).to(dtype)
    hf.export(model, Words(), tmp_path / "out")
    options, state = hf.load(tmp_path / "out", dtype)
    assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(model.state_dict(), dtype)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    again = made(seed=2, **changes).to(dtype)
    hf.load_into(again, tmp_path / "out")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert (options.depth, options.width, options.kv_heads, options.context) == (2, 32, 2, 16)
    hf.require_same(hf.options_of(model.size), options, "there")


def test_large_weights_are_split_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "FILE_BYTES", 8000)
    model = exported(tmp_path / "out")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / hf.INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 4 * decoder_shapes.parameter_count(hf.options(tmp_path / "out"))
    _, state = hf.load(tmp_path / "out", torch.float32)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            transformers_model(tmp_path / "out")(tokens).logits, model(tokens), atol=1e-5, rtol=1e-4
        )


def test_the_folder_holds_what_transformers_looks_for(tmp_path):
    exported(tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_second_export_replaces_the_first(tmp_path):
    exported(tmp_path / "out", seed=1)
    model = exported(tmp_path / "out", seed=2)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], model.embedding.weight)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an export"):
        hf.export(made(), Words(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_export_leaves_nothing_and_the_earlier_one_untouched(tmp_path):
    class Broken:
        def save(self, folder) -> None:
            raise OSError(28, "No space left on device")

    model = exported(tmp_path / "out")
    with pytest.raises(UserError, match="No space left"):
        hf.export(made(seed=2), Broken(), tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    _, state = hf.load(tmp_path / "out", torch.float32)
    assert torch.equal(state["embedding.weight"], model.embedding.weight)


def test_an_export_that_reads_back_changed_is_refused(tmp_path, monkeypatch):
    def flipped(tensors, folder, **options) -> None:
        save({**tensors, "model.norm.weight": -tensors["model.norm.weight"]}, folder, **options)

    save = huggingface_hub.save_torch_state_dict
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", flipped)
    with pytest.raises(UserError, match=r"model\.norm\.weight was read back changed"):
        hf.export(made(), Words(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_sizes_than_those_of_the_weights_are_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exported(tmp_path / "out")
    (tmp_path / "recipe.toml").write_text('[model]\ninitial = "out"\ndepth = 1\n[data]\npath = "python:stdlib"\n')
    monkeypatch.setattr(probe, "ready", lambda *_, **__: pytest.fail("the machine was measured"))
    assert cli.main(["plan", "recipe.toml"]) == 2
    assert "model.depth = 1, but 2 there" in capsys.readouterr().err


def test_options_that_differ_from_the_weights_are_all_named(tmp_path):
    exported(tmp_path / "out")
    with pytest.raises(UserError, match="do not fit") as refused:
        hf.load_into(made(depth=3, rope_theta=500.0), tmp_path / "out")
    assert "model.depth = 3, but 2 there" in refused.value.why
    assert "model.rope_theta = 500.0, but 10000.0 there" in refused.value.why
    with pytest.raises(UserError, match="do not fit"):
        hf.load_into(made(config.Moe), tmp_path / "out")


def test_another_context_is_no_difference(tmp_path):
    model = exported(tmp_path / "out")
    longer = made(context=64, seed=2)
    hf.load_into(longer, tmp_path / "out")
    tokens = torch.arange(16)[None]
    assert torch.equal(longer(tokens), model(tokens))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"attention_bias": True}, "attention.query.bias is missing"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e5}}, "longrope"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "does not say 'factor'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_parameters": 3}, "config.json cannot be read"),
    ],
)
def test_a_folder_this_decoder_cannot_take_over_is_refused_by_name(tmp_path, change, named):
    exported(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    table = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))
    with pytest.raises(UserError, match=named):
        hf.load(tmp_path / "out", torch.float32)


def test_missing_and_unknown_weights_are_named(tmp_path):
    exported(tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    stored = load_file(path)
    stored["strange.weight"] = stored.pop("model.norm.weight")
    save_file(stored, path)
    with pytest.raises(UserError) as refused:
        hf.load_into(made(), tmp_path / "out")
    assert "norm.weight is missing" in refused.value.why
    assert "strange.weight is not known" in refused.value.why
    stored["model.norm.weight"] = stored.pop("strange.weight")[:3].clone()
    save_file(stored, path)
    with pytest.raises(UserError, match=r"norm.weight is \[3\], and its config.json says"):
        hf.load_into(made(), tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"not what it should be"])
def test_missing_and_damaged_files_are_named(tmp_path, name, content):
    exported(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    if content is not None:
        (tmp_path / "out" / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        hf.load(tmp_path / "out", torch.float32)


@pytest.mark.parametrize("spec", ["bytes", "bpe:300", "foreign"])
def test_transformers_goes_on_from_a_text_as_predict_does_token_by_token(tmp_path, spec):
    texts = ["the vines climb the wall and the wall holds the vines. "] * 20
    if spec == "foreign":  # its own template puts another token first
        made_of(texts, tmp_path / "foreign")
        spec = str(tmp_path / "foreign")
    words = tokenizer.open_tokenizer(spec, lambda: texts, tmp_path / "cache")
    model = made(vocabulary=words.vocabulary, context=64).eval()
    hf.export(model, words, tmp_path / "out")
    theirs = transformers_model(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        prompt = AutoTokenizer.from_pretrained(tmp_path / "out")("the wall", return_tensors="pt")["input_ids"]
        continued = theirs.generate(prompt, max_new_tokens=12, do_sample=False)
    ids = [words.boundary, *words.encode(b"the wall").tolist()]
    ends = (words.boundary, *words.document_end)
    ours = generate.generate(model, ids, tokens=12, stop=ends)
    assert prompt[0].tolist() == ids
    assert [one for one in continued[0].tolist()[len(ids) :] if one not in ends] == list(ours)


def made_of(texts, folder):
    """A tokenizer of somebody else: `<s>` is put first, and texts end with `</s>`."""
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.train_from_iterator(
        texts, tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    )
    inner.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
