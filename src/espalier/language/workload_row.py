"""Language models in the table of kinds: weights to start from, vocabulary, the planner's questions, text, export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from espalier.language import gpt, token_store
from espalier.language.decoder_workload import DecoderWorkload, embeddings, new_model, work_of
from espalier.language.operation_counts import DecoderLoad
from espalier.language.tokenizer import Tokenizer, kept_tokenizer, open_tokenizer, prefix_note, text_of
from espalier.language.workload import LanguageWorkload, open_language, thaw
from espalier.plan.axes.flat_layout import runs
from espalier.recipe import Adapters, Decoder, Dpo, Moe, Recipe, Tuning, decoder_shapes, defaults
from espalier.recipe.base import Derivation
from espalier.recipe.cost import Anatomy, Cut, ExpertSizes, Profile
from espalier.recipe.decoder_defaults import layers_taken
from espalier.recipe.errors import UserError
from espalier.train.workload_row import (
    Answer,
    Exports,
    Freezes,
    Opening,
    Predicts,
    Prepared,
    Row,
    Sampling,
    TextPiece,
    Tokenizes,
    Writer,
    Writes,
)
from espalier.train.wrap_policy import deeper, on_last_rank, sizes_of, tally

if TYPE_CHECKING:
    from espalier.language.tune.workload import TuneWorkload
    from espalier.plan.axes.flat_layout import Sized


def _options(recipe: Recipe) -> Decoder:
    assert isinstance(recipe.model, Decoder)
    return recipe.model


def _frozen_tokenizer(recipe: Recipe, opening: Opening) -> Tokenizer | None:
    return None if opening.frozen is None else kept_tokenizer(recipe.data[0].tokenizer, opening.frozen)


def _with_initial(recipe: Recipe, initial: str) -> tuple[Recipe, Sequence[Derivation]]:
    """Sizes and the tokenizer that the recipe leaves open are those of the weights it starts from."""
    from espalier.language import hf

    model = _options(recipe)
    stored = hf.options(Path(initial))
    if type(stored) is not type(model):
        kind = stored.__struct_config__.tag
        raise UserError(f"model.initial = {initial!r} holds another kind of model.", do=f'model.kind = "{kind}"')
    derived = []
    if model.layers is not None:
        count = layers_taken(model)
        whole = stored.depth or 0
        if count > whole:
            raise UserError(f"model.layers = {model.layers!r}, but {initial} has {whole} layers.", do="fewer, or all")
        stored = stored.changed(depth=count)
        reason = f"the first {count} of {whole} layers of {initial}, as model.layers says"
        derived.append(Derivation("model.depth", count, reason))
    plain = type(model)()
    names = [name for name in model.__struct_fields__ if getattr(model, name) != getattr(plain, name)]
    sized = recipe.changed(model=stored.changed(**{name: getattr(model, name) for name in names}))
    hf.require_same(_options(sized), stored, initial)
    spec = _initial_tokenizer(recipe, initial, stored.vocabulary or 0)
    if not any(source.tokenizer == "auto" for source in recipe.data):
        return sized, derived
    reason = "the tokenizer of the weights in model.initial"
    return defaults.with_tokenizer(sized, spec), [*derived, Derivation("data.tokenizer", spec, reason)]


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
    plain = tokenizer.files.contents == open_tokenizer("bytes").files.contents  # no template, for one
    for spec in given:
        other = None if spec.startswith("bpe:") else open_tokenizer(spec)
        if other is None or other.table() != tokenizer.table():
            has = "trained on this corpus" if other is None else f"{other.vocabulary} tokens"
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


# --- for the planner ---------------------------------------------------------------------------------------------


def _profile(recipe: Recipe) -> Profile:
    """Of a decoder and where it can be cut; opens no corpus."""
    options = _options(recipe)
    sequence = recipe.train.sequence
    assert sequence is not None
    assert recipe.train.batch_tokens is not None
    size, work = decoder_shapes.sizes(options), work_of(options)
    passes = 1
    global_batch = recipe.train.batch_tokens // sequence
    # Its blocks are alike, so one and two of them are built, on the meta device.
    models = [new_model(options.changed(depth=depth), 0, torch.device("meta")) for depth in (1, 2)]
    if recipe.tune is not None:
        from espalier.language.tune import dpo, lora
        from espalier.language.tune import workload as tuned

        global_batch = tuned.batch_of(recipe)
        models = [tuned.adapted(model, recipe) for model in models]
        passes = dpo.ROWS if isinstance(recipe.tune, Dpo) else 1

    def anatomy(micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Anatomy:
        load = DecoderLoad(size, sequence, micro_batch * passes, recompute, precision, cut)
        return work(load) if recipe.tune is None else _tuned(work(load), load, recipe.tune)

    shallow, two = (tally(model, list(model.blocks), embeddings(model)) for model in models)
    depth, tables = options.depth or 1, 1 if size.tied else 2
    model = models[min(depth, 2) - 1]
    single = sizes_of(model, list(model.blocks), embeddings(model))
    parameters = 3.0 * size.width * size.feed_forward * size.experts

    @cache
    def tensors(ranks: int) -> Sequence[Sized]:
        parts = runs(single if ranks == 1 else on_last_rank(model, single, gpt.roles(model), ranks))
        return parts if depth == 1 else deeper(parts, depth)

    experts = ExpertSizes(size.experts, size.active, parameters, tensors)
    profile = Profile(
        **vars(replace(shallow.with_more(two, depth - 1), sizes=tensors(1))),
        global_batch=global_batch,
        tokens_per_sample=float(sequence * passes),
        anatomy=anatomy,
        facts=({"expert_parallel": experts} if isinstance(options, Moe) else {})
        | ({"token_chunks": True} if recipe.tune is None else {}),
    )
    if isinstance(recipe.tune, Adapters):
        each = 8 if recipe.train.precision == "fp64" else 4
        frozen = [tuple(lora.frozen_sizes(model, recipe.tune, each)) for model in models]
        least, more = (sum(sized.elements * sized.element_bytes for sized in sizes) for sizes in frozen)
        layers = [[sized for sized in sizes if sized.block is not None] for sizes in frozen]
        untrained = layers[0] if depth == 1 or not layers[0] else deeper(layers[1], depth)
        weights = least + (depth - 1) * (more - least)
        return replace(profile, layers=depth, frozen=weights, untrained=untrained)
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


def _tuned(anatomy: Anatomy, load: DecoderLoad, tune: Tuning) -> Anatomy:
    """The work of a model that is tuned, whose tokens are all there at once."""
    from espalier.language.tune import answer_loss, lora

    layer, rest = (replace(part, chunks=None) for part in (anatomy.layer, anatomy.rest))
    anatomy = replace(anatomy, layer=layer, rest=rest)
    if not isinstance(tune, Dpo):
        each = load.whole  # of the head's gradient
        if isinstance(tune, Adapters):  # of its copy for products
            stored = load.whole if tune.frozen == "fp32" else 2
            each = load.compute * (stored != load.compute)
        anatomy = answer_loss.work(anatomy, float(each * load.size.vocabulary * load.size.width))
    return lora.work(anatomy, load, tune) if isinstance(tune, Adapters) else anatomy


# --- the row -------------------------------------------------------------------------------------------------------


def _to_hf(workload: DecoderWorkload, model: gpt.GPT, folder: Path) -> str:
    from espalier.language import hf
    from espalier.language.tune import workload as tuned

    tokenizer = workload.exported_tokenizer
    hf.export(tuned.plain(model), tokenizer, folder)
    loads = f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}) loads it."
    return " ".join([loads, *_tokenizer_notes(workload, workload.tokenizer, folder)])


def _to_gguf(kind: str, workload: DecoderWorkload, model: gpt.GPT, folder: Path) -> str:
    from espalier.language import gguf_export
    from espalier.language.tune import workload as tuned

    tokenizer = workload.exported_tokenizer
    ends = [text_of(tokenizer, ending) for ending in workload.endings]
    apart = gguf_export.export(tuned.plain(model), tokenizer, [*dict.fromkeys(ends)], folder, kind)
    loads = (
        f"`ollama create NAME -f {folder}/Modelfile` and llama.cpp's `llama-cli -m {folder}/model.gguf` load it; its "
        f"logits are within {apart:.2g} of the checkpoint's."
    )
    return " ".join([loads, *_tokenizer_notes(workload, tokenizer)])


def _to_peft(workload: DecoderWorkload, model: gpt.GPT, folder: Path) -> str:
    from espalier.language.tune import peft

    return " ".join([peft.export(workload, model, folder), *_tokenizer_notes(workload, workload.tokenizer, folder)])


def _tokenizer_notes(workload: DecoderWorkload, tokenizer: Tokenizer, folder: Path | None = None) -> Iterator[str]:
    """What programs that load an exported `tokenizer` do otherwise than training did; `folder`: of its files."""
    from espalier.language import auto_tokenizer

    yield prefix_note(tokenizer)
    end = workload.endings[0]
    if len(end) > 1:
        text = tokenizer.decode(end)
        yield f"Answers end with {text!r}, which is {len(end)} tokens: give it to other programs as a text to stop at."
    if folder is not None:
        yield from auto_tokenizer.differences(tokenizer, folder)


def _answer(text: str, pieces: Iterator[TextPiece], shown: bool) -> Answer:
    """What was written of `text`, which is `shown` to people before it."""

    def record() -> Mapping[str, Any]:
        written = list(pieces)
        count = sum(piece.tokens for piece in written) - (written[-1].finish == "stop")
        return {"prompt": text, "text": "".join(piece.text for piece in written), "tokens": count}

    return Answer(chain([text] if shown else [], (piece.text for piece in pieces), ["\n"]), record)


class LanguageRow(Row, Freezes, Predicts, Writes, Tokenizes, Exports):
    """Decoders, trained on text or on conversations."""

    reading = "Reading the corpus"
    exports: ClassVar = {
        "hf": _to_hf,
        "peft": _to_peft,
        **{name: partial(_to_gguf, kind) for name, kind in GGUF_FORMS.items()},
    }

    def prepare(self, recipe: Recipe, opening: Opening) -> Prepared:
        """Reads the corpus or the conversations, and where training begins from weights, their sizes."""
        derived: Sequence[Derivation] = ()
        initial = _options(recipe).initial
        if recipe.tune is not None:
            from espalier.language.tune import chat_recipe as tuning

            base = tuning.base_of(opening)
            initial = initial if base is None else str(base)
        if initial is not None:
            recipe, derived = _with_initial(recipe, initial)
        tokenizer = _frozen_tokenizer(recipe, opening)
        if recipe.tune is not None:
            return tuning.prepare(recipe, opening, derived, tokenizer)
        if not recipe.data or _options(recipe).vocabulary is not None:
            return Prepared(recipe, derivations=derived)
        stores = token_store.build_all(recipe.data, progress=opening.progress, tokenizer=tokenizer)
        return Prepared(recipe, stores[0].tokenizer.vocabulary, stores, derived)

    def open(self, recipe: Recipe, opening: Opening) -> LanguageWorkload | TuneWorkload:
        """Reads the corpus or the conversations."""
        if recipe.tune is not None:
            from espalier.language.tune import chat_recipe as tuning

            return tuning.open_tuning(recipe, opening, _frozen_tokenizer(recipe, opening))
        if opening.frozen is not None and not opening.reads:
            model = msgspec.structs.replace(_options(recipe), initial=None)  # a checkpoint has taken the weights' place
            return LanguageWorkload(recipe.changed(model=model), [], thaw(recipe, opening.frozen))
        if opening.data:
            return LanguageWorkload(recipe, opening.data)
        return open_language(recipe, opening.progress, _frozen_tokenizer(recipe, opening))

    def profile(self, recipe: Recipe, opened: Callable[[], Any]) -> Profile:
        """By the options alone: no corpus is opened."""
        return _profile(recipe)

    def contents(self, recipe: Recipe, workload: LanguageWorkload | TuneWorkload) -> Mapping[str, str]:
        """Of each file of the corpora."""
        return workload.contents(recipe)

    def freeze(self, workload: LanguageWorkload | TuneWorkload, folder: Path) -> None:
        """The tokenizer and what is held out."""
        workload.freeze(folder)

    def suffices(self, frozen: Path, evaluation: bool) -> bool:
        """What is held out is there."""
        return True

    def answer(
        self, workload: LanguageWorkload | TuneWorkload, model: gpt.GPT, text: str | None, sampling: Sampling
    ) -> Answer:
        """What follows a text; to a question, the answer."""
        return self.answers(workload, model, [text], sampling)[0]

    def answers(
        self,
        workload: LanguageWorkload | TuneWorkload,
        model: gpt.GPT,
        texts: Sequence[str | None],
        sampling: Sampling,
    ) -> Sequence[Answer]:
        """Written together."""
        from espalier.language import generate

        if None in texts:
            raise UserError("espalier predict needs a text.", do="espalier predict RUN 'text'")
        asked = [text for text in texts if text is not None]
        prompts = [workload.question(text) for text in asked]
        pieces = self.writer(workload, model).write(prompts, [sampling] * len(asked))
        rows = generate.by_row(pieces, len(asked))
        return [_answer(text, row, workload.recipe.tune is None) for text, row in zip(asked, rows, strict=True)]

    def writer(self, workload: LanguageWorkload | TuneWorkload, model: gpt.GPT) -> Writer:
        """See `language.generate`. Turns are for a run with [tune]."""
        from espalier.language import generate

        def prompt(asked: str | Sequence[tuple[str, str]]) -> list[int]:
            return workload.text_prompt(asked) if isinstance(asked, str) else workload.prompt(asked)

        def write(prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> Iterator[TextPiece]:
            decoding = generate.Decoding(model, prompts, samplings)
            return generate.write(decoding, workload.tokenizer, workload.endings)

        return Writer(prompt, write, model.size.context)

    def usage(self, recipe: Mapping[str, Any]) -> tuple[str, str]:
        """A question, or the beginning of a program."""
        return ("ask", " --chat") if recipe.get("tune") else ("go on", " 'def '")

    def tokenizer(self, workload: DecoderWorkload) -> Tokenizer:
        """Of the model."""
        return workload.tokenizer


ROW = LanguageRow()
