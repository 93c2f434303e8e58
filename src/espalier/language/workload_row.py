"""Language models in the table of kinds: weights to start from, vocabulary, the planner's questions, text, export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from espalier.language import gpt, text_sources, token_store
from espalier.language.decoder_workload import DecoderWorkload, embeddings, new_model, work_of
from espalier.language.operation_counts import DecoderLoad
from espalier.language.tokenizer import Tokenizer, kept_tokenizer, open_tokenizer, prefix_note
from espalier.language.workload import LanguageWorkload, freeze, open_language, thaw
from espalier.parallel.workload import Workload
from espalier.recipe import Adapters, Dpo, Gpt, Moe, Recipe, data_hash, decoder_shapes, defaults
from espalier.recipe.base import Derivation
from espalier.recipe.cost import Anatomy, Cut
from espalier.recipe.errors import UserError
from espalier.train.workload_row import Answer, Opening, Prepared, Profile, Row, Sampling, tally
from espalier.train.wrap_policy import deeper, sizes_of


def _options(recipe: Recipe) -> Gpt | Moe:
    assert isinstance(recipe.model, Gpt | Moe)
    return recipe.model


def _prepare(recipe: Recipe, opening: Opening) -> Prepared:
    derived: Sequence[Derivation] = ()
    if (initial := _initial(recipe, opening)) is not None:
        recipe, derived = _with_initial(recipe, initial)
    if recipe.tune is not None:
        from espalier.language.tune import chat_recipe as tuning

        return tuning.prepare(recipe, opening, derived, _kept_tokenizer(recipe, opening))
    if not recipe.data or _options(recipe).vocabulary is not None:
        return Prepared(recipe, derivations=derived)
    stores = token_store.build_all(recipe.data, progress=opening.progress, tokenizer=_kept_tokenizer(recipe, opening))
    return Prepared(recipe, stores[0].tokenizer.vocabulary, stores, derived)


def _initial(recipe: Recipe, opening: Opening) -> str | None:
    """Where the weights are that training begins with."""
    if recipe.tune is not None:
        from espalier.language.tune.chat_recipe import base_of

        if (base := base_of(opening)) is not None:
            return str(base)
    return _options(recipe).initial


def _kept_tokenizer(recipe: Recipe, opening: Opening) -> Tokenizer | None:
    return None if opening.kept is None else kept_tokenizer(recipe.data[0].tokenizer, opening.kept)


def _with_initial(recipe: Recipe, initial: str) -> tuple[Recipe, Sequence[Derivation]]:
    """Sizes and the tokenizer that the recipe leaves open are those of the weights it starts from."""
    from espalier.language import hf

    model, stored = _options(recipe), hf.options(Path(initial))
    if type(stored) is not type(model):
        kind = stored.__struct_config__.tag
        raise UserError(f"model.initial = {initial!r} holds another kind of model.", do=f'model.kind = "{kind}"')
    plain = type(model)()
    given = {name: getattr(model, name) for name in model.__struct_fields__}
    given_values = {name: value for name, value in given.items() if value != getattr(plain, name)}
    sized = msgspec.structs.replace(recipe, model=msgspec.structs.replace(stored, **given_values))
    spec = _initial_tokenizer(recipe, initial, stored.vocabulary or 0)
    if not any(source.tokenizer == "auto" for source in recipe.data):
        return sized, ()
    reason = "the tokenizer of the weights in model.initial"
    return defaults.with_tokenizer(sized, spec), [Derivation("data.tokenizer", spec, reason)]


def _initial_tokenizer(recipe: Recipe, initial: str, vocabulary: int) -> str:
    """The tokenizer of the weights in `initial`, as `data.tokenizer` names it. Raises UserError where the recipe names
    one of other ids, and where nobody says which it is."""
    from espalier.language import hf

    file = hf.tokenizer_of(initial)
    given = {source.tokenizer for source in recipe.data} - {"auto"}
    if file is None:
        if recipe.data and not given and vocabulary != BYTES:
            raise UserError(
                f"model.initial = {initial!r} has no tokenizer.json.",
                why=f"its {vocabulary} tokens mean nothing without it",
                do="put the tokenizer.json that the weights were trained with there, or name it as data.tokenizer",
            )
        return "bytes"
    tokenizer = open_tokenizer(str(file))
    plain = tokenizer.table() == open_tokenizer("bytes").table()
    for spec in given:
        trained = spec.startswith("bpe:")
        if trained or open_tokenizer(spec).table() != tokenizer.table():
            has = "trained on this corpus" if trained else f"{open_tokenizer(spec).vocabulary} tokens"
            raise UserError(
                f"data.tokenizer = {spec!r} ({has}) is not the tokenizer of model.initial = {initial!r} "
                f"({file}, {tokenizer.vocabulary} tokens).",
                why="the weights would read other tokens under the same ids",
                do="leave data.tokenizer out: it is then that of the weights",
            )
    return "bytes" if plain else str(file)


BYTES = 256
"""Tokens of plain bytes."""
GGUF_FORMS = {"gguf": "F16", "gguf-q8_0": "Q8_0", "gguf-q4_0": "Q4_0"}
"""Forms of `espalier export --to`, and how the matrices are stored."""


def _open(recipe: Recipe, opening: Opening) -> Workload:
    if recipe.tune is not None:
        from espalier.language.tune import chat_recipe as tuning

        return tuning.open_tuning(recipe, opening, _kept_tokenizer(recipe, opening))
    if opening.kept is not None and not opening.reads:
        model = msgspec.structs.replace(_options(recipe), initial=None)  # a checkpoint has taken the weights' place
        return LanguageWorkload(msgspec.structs.replace(recipe, model=model), [], thaw(recipe, opening.kept))
    if opening.data:
        return LanguageWorkload(recipe, opening.data)
    return open_language(recipe, opening.progress, _kept_tokenizer(recipe, opening))


def _freeze(workload: Workload, folder: Path) -> None:
    if isinstance(workload, LanguageWorkload):
        freeze(workload, folder)
        return
    from espalier.language.tune import workload as tuned

    assert isinstance(workload, tuned.TuneWorkload)
    tuned.freeze(workload, folder)


def _contents(recipe: Recipe, workload: Workload) -> Mapping[str, str]:
    """Of each file of the corpora; what has no files is one by its tokens."""
    if not isinstance(workload, LanguageWorkload):
        from espalier.language.tune import workload as tuned

        assert isinstance(workload, tuned.TuneWorkload)
        return tuned.contents(recipe, workload)
    hashes: dict[str, str] = {}
    for data, store in zip(recipe.data, workload.stores, strict=True):
        scheme = data.path == "python:stdlib"
        entries = [entry for entry in text_sources.listing(data).entries if entry.path]
        named = {f"{data.path}/{entry.name}" if scheme else entry.path: entry.path for entry in entries}
        hashes |= data_hash.hashes(named) if named else {data.path: store.fingerprint}
    return hashes


# --- for the planner ---------------------------------------------------------------------------------------------


def _unchunked(anatomy: Anatomy, vocabulary: int, width: int) -> Anatomy:
    return anatomy


def _tuned(model: gpt.GPT, recipe: Recipe) -> gpt.GPT:
    """`model` as `recipe.tune` trains it."""
    if recipe.tune is None:
        return model
    from espalier.language.tune.workload import adapted

    return adapted(model, recipe)


def _profile(recipe: Recipe, opened: Callable[[], Workload]) -> Profile:
    """Of a decoder and where it can be cut; opens no corpus."""
    options, sequence = _options(recipe), recipe.train.sequence
    assert sequence is not None
    assert recipe.train.batch_tokens is not None
    size, work = decoder_shapes.sizes(options), work_of(options)
    passes, global_batch, chunked = 1, recipe.train.batch_tokens // sequence, _unchunked
    if recipe.tune is not None:
        from espalier.language.tune import answer_loss, dpo
        from espalier.language.tune import workload as tuned

        global_batch = tuned.batch_of(recipe)
        if isinstance(recipe.tune, Dpo):
            passes = dpo.ROWS
        else:
            chunked = answer_loss.work

    def anatomy(micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        whole = work(DecoderLoad(size, sequence, micro_batch * passes, recompute, precision, cut))
        whole = chunked(whole, size.vocabulary, size.width)
        return whole.undivided if isinstance(recipe.tune, Adapters) else whole

    # Its blocks are alike, so one and two of them are built, on the meta device.
    models = [_tuned(new_model(options.changed(depth=depth), 0, torch.device("meta")), recipe) for depth in (1, 2)]
    shallow, two = (tally(model, embeddings(model)) for model in models)
    few, several = (sizes_of(model, list(model.blocks), embeddings(model)) for model in models)
    depth, tables = options.depth or 1, 1 if size.tied else 2
    profile = Profile(
        tally=replace(shallow.with_more(two, depth - 1), sizes=few if depth == 1 else deeper(several, depth)),
        global_batch=global_batch,
        tokens_per_sample=float(sequence * passes),
        anatomy=anatomy,
    )
    if isinstance(recipe.tune, Adapters):  # ranks have all of the frozen weights
        from espalier.language.tune import lora

        each = 8 if recipe.train.precision == "fp64" else 4
        least, more = (lora.frozen_bytes(model, recipe.tune, each) for model in models)
        return replace(profile, frozen=least + (depth - 1) * (more - least))
    return replace(
        profile,
        layers=size.layers,
        outside=tables * size.vocabulary * size.width + size.width,
        tables=tables,
        heads=size.heads,
        kv_heads=size.kv_heads,
        width=size.width,
        kv_width=size.kv_width,
    )


# --- for the verbs -----------------------------------------------------------------------------------------------


def _answer(workload: Workload, model: nn.Module, text: str | None, sampling: Sampling) -> Answer:
    assert isinstance(model, gpt.GPT)
    if not isinstance(workload, LanguageWorkload):
        from espalier.language.tune import chat_recipe as tuning
        from espalier.language.tune.workload import TuneWorkload

        assert isinstance(workload, TuneWorkload)
        return tuning.answer(workload, model, text, sampling)
    if text is None:
        raise UserError("espalier predict needs a prompt.", do="espalier predict RUN 'def '")
    tokenizer = _tokenizer(workload)
    ids = [tokenizer.boundary, *(int(token) for token in tokenizer.encode(text.encode()))]
    from espalier.language import generate

    fresh = generate.generate(
        model,
        torch.tensor(ids),
        tokens=sampling.tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=(tokenizer.boundary, *tokenizer.document_end),
    )

    def record() -> Mapping[str, Any]:
        made = [int(token) for token in fresh]
        return {"prompt": text, "text": tokenizer.decode(made), "tokens": len(made)}

    return Answer(_as_it_comes(text, fresh, tokenizer), record)


def _as_it_comes(prompt: str, fresh: Iterator[Any], tokenizer: Tokenizer) -> Iterator[str]:
    yield prompt
    made: list[int] = []
    shown = ""
    for token in fresh:
        made.append(int(token))
        text = tokenizer.decode(made)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is still incomplete
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(made)[len(shown) :] + "\n"


def _tokenizer(workload: Workload) -> Tokenizer:
    assert isinstance(workload, DecoderWorkload)
    return workload.tokenizer


def _exported_tokenizer(workload: Workload) -> Tokenizer:
    assert isinstance(workload, DecoderWorkload)
    return workload.exported_tokenizer


def _export(workload: Workload, model: nn.Module, folder: Path) -> str:
    assert isinstance(model, gpt.GPT)
    if isinstance(workload, LanguageWorkload):
        from espalier.language import hf

        hf.export(model, _tokenizer(workload), folder)
    else:
        from espalier.language.tune import workload as tuned

        assert isinstance(workload, tuned.TuneWorkload)
        tuned.export(workload, model, folder)
    loads = f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}) loads it."
    return f"{loads} {prefix_note(_tokenizer(workload))}"


def _reply(workload: Workload, model: nn.Module, turns: Sequence[tuple[str, str]], sampling: Sampling) -> Iterator[str]:
    assert isinstance(model, gpt.GPT)
    if isinstance(workload, LanguageWorkload):
        raise UserError(
            "The run was trained on plain text, which has no turns.",
            why="a chat template says where questions and answers begin",
            do="a recipe with [tune] (docs/tune.md), or espalier predict RUN 'text to go on from'",
        )
    from espalier.language.tune import chat_recipe as tuning
    from espalier.language.tune.workload import TuneWorkload

    assert isinstance(workload, TuneWorkload)
    return tuning.reply(workload, model, turns, sampling)


def _to_gguf(kind: str, workload: Workload, model: nn.Module, folder: Path) -> str:
    from espalier.language import gguf_export
    from espalier.language.tune import workload as tuned

    assert isinstance(model, gpt.GPT)
    tokenizer = _exported_tokenizer(workload)
    apart = gguf_export.export(tuned.plain(model), tokenizer, tokenizer.files.template, folder, kind)
    return (
        f"`ollama create NAME -f {folder}/Modelfile` and llama.cpp's `llama-cli -m {folder}/model.gguf` load it; its "
        f"logits are within {apart:.2g} of the checkpoint's. {prefix_note(tokenizer)}"
    )


def _to_peft(workload: Workload, model: nn.Module, folder: Path) -> str:
    from espalier.language.tune import peft

    return peft.export(workload, model, folder)


ROW = Row(
    open=_open,
    profile=_profile,
    reading="Reading the corpus",
    prepare=_prepare,
    freeze=_freeze,
    evaluates=True,
    contents=_contents,
    answer=_answer,
    exports={
        "hf": _export,
        "peft": _to_peft,
        **{name: partial(_to_gguf, kind) for name, kind in GGUF_FORMS.items()},
    },
    tokenizer=_tokenizer,
    usage=lambda recipe: ("ask", " --chat") if recipe.get("tune") else ("go on", " 'def '"),
    reply=_reply,
)
