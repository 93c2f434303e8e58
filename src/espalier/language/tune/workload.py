"""The Workload Protocol's answer for fine-tuning: rows of conversations, a loss on answers, adapters or all weights."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from espalier.kernels.linear_cross_entropy import IGNORED
from espalier.language import generate, gpt, hf, row_files, text_sources
from espalier.language.decoder_workload import DecoderWorkload, RowBatch, TokenWindows
from espalier.language.tokenizer import Tokenizer, kept_tokenizer, open_tokenizer
from espalier.language.tune import chat_rows, dpo, lora, peft
from espalier.language.tune.answer_loss import answer_loss, row_log_probability
from espalier.language.tune.chat_rows import ChatTokens
from espalier.language.tune.chat_template import FILE, ChatTemplate, open_template
from espalier.language.tune.conversations import Turn
from espalier.parallel.workload import (
    Averages,
    Pieces,
    Plain,
    Progress,
    Role,
    Shard,
    Skeleton,
    SummedLoss,
    Sums,
)
from espalier.recipe import Adapters, Dpo, Lora, Recipe, Tuning
from espalier.recipe.cost import Work
from espalier.recipe.errors import UserError
from espalier.recipe.sections import VALIDATE_TOKENS
from espalier.store.artifacts import Artifact, Text
from espalier.train.workload_row import Sampling

BASE = "base"
"""The folder, beside what preprocessing decided, of the weights that are frozen under adapters."""
ADAPTER = "adapter"
"""The folder of the adapters that training goes on from."""
EPOCHS = 3
"""Passes over the conversations by default, as transformers' Trainer makes."""
_HELD_OUT = "held_out.npz"


class ConversationSplit(NamedTuple):
    """What is trained on, what is held out, and what the user should know of both."""

    tokenizer: Tokenizer
    template: ChatTemplate
    train: ChatTokens | None
    held_out: ChatTokens
    notes: Sequence[str] = ()


class TuneWorkload(DecoderWorkload):
    """One decoder and its conversations. Samples are rows, or with preferences pairs. `initial`: what `model.initial`
    named when the run began; None: what it names."""

    def __init__(self, recipe: Recipe, chats: ConversationSplit, initial: str | None = None) -> None:
        super().__init__(recipe, chats.tokenizer)
        assert recipe.tune is not None
        self.initial = initial or self.initial
        self.tune: Tuning = recipe.tune
        self.chats = chats
        self.pairs = isinstance(recipe.tune, Dpo)
        self.measured = dpo.PairLosses._fields if self.pairs else self.measured
        self.global_batch = batch_of(recipe)
        self.held_rows = self._rows_of(chats.held_out)
        self.train_rows = [] if chats.train is None else self._rows_of(chats.train)
        self._ordered = lru_cache(2)(self._order)
        answers = 1.0 if self.pairs or chats.train is None else chats.train.answers.sum() / len(self.train_rows)
        self.nominal_weight = max(1.0, float(self.global_batch * answers))

    # --- the model -----------------------------------------------------------------------------------------------

    def build(self, device: torch.device, dtype: torch.dtype) -> gpt.GPT:
        """The decoder of `model.initial`, adapted as the recipe says; frozen weights in fewer bits are read and stored
        one by one, and nothing ever holds the whole."""
        fewer = isinstance(self.tune, Adapters) and self.tune.rank and self.tune.frozen in lora.BITS
        if not fewer or device.type == "meta":
            return adapted(super().build(device, dtype), self.recipe)
        model, value = super().skeleton()

        def fill(module: nn.Module, prefix: str) -> None:
            for name, _ in [*module.named_parameters(prefix, recurse=False)]:
                parameter = nn.Parameter(value(name).to(dtype), requires_grad=False)
                module.register_parameter(name.rpartition(".")[2], parameter)

        assert isinstance(model, gpt.GPT)
        return adapted(model, self.recipe, fill).to(device)

    def skeleton(self) -> Skeleton:
        """As it is built: frozen weights are on every rank."""
        return Plain.skeleton(self)

    def pieces(self, model: gpt.GPT) -> Pieces | None:
        """Of a decoder that is trained on answers; None: of pairs, whose loss calls the model twice."""
        return None if self.pairs else super().pieces(model)

    def roles(self, model: gpt.GPT) -> Mapping[str, Role] | None:
        """Of a decoder that is trained whole; None: a frozen part has no optimizer."""
        return None if isinstance(self.tune, Adapters) else super().roles(model)

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        """Of so many rows, or pairs of rows."""
        return super().work(micro_batch * (dpo.ROWS if self.pairs else 1), recompute, precision)

    @property
    def exported_tokenizer(self) -> Tokenizer:
        """With the chat template, and with the token that ends an answer, where it is one."""
        tokenizer = self.tokenizer.with_template(self.chats.template.text)
        end = self.endings[0]
        return tokenizer.with_end(end[0]) if len(end) == 1 else tokenizer

    # --- the data ------------------------------------------------------------------------------------------------

    def _rows_of(self, chats: ChatTokens) -> list[list[int]]:
        if self.pairs:
            return [[chat, chat + 1] for chat in range(0, len(chats), 2)]
        return chat_rows.packed(chats.lengths, self.sequence)

    def _order(self, epoch: int) -> Any:
        return np.random.default_rng([self.recipe.train.seed, epoch]).permutation(len(self.train_rows))

    def _chosen(self, step: int, shard: Shard) -> list[list[int]]:
        """The conversations of each row, or pair, of the shard."""
        assert self.train_rows, "a run that is only evaluated has no training data"
        first = step * self.global_batch
        places = (divmod(place, len(self.train_rows)) for place in range(first + shard.start, first + shard.stop))
        return [self.train_rows[self._ordered(epoch)[place]] for epoch, place in places]

    def _batch(self, chats: ChatTokens, rows: Sequence[Sequence[int]], shard: Shard) -> TokenWindows:
        sequence = self.sequence
        if self.pairs:
            rows = [[chat] for row in rows for chat in row]
            longest = max((int(chats.lengths[side[0]]) for side in rows), default=1)
            sequence = min(sequence, -(-longest // 64) * 64)
        arrays = chat_rows.filled(chats, rows, sequence, self.tokenizer.boundary)
        return RowBatch(*map(torch.from_numpy, arrays)).part(shard)

    def batches(self, step: int, shard: Shard) -> list[TokenWindows]:
        """Rows in an order that is drawn anew for each epoch."""
        rows = self._chosen(step, shard)
        train = self.chats.train
        assert train is not None
        return [self._batch(train, rows[start - shard.start : stop - shard.start], shard) for start, stop in shard.cuts]

    def documents(self, step: int, shard: Shard) -> list[str]:
        """Names of the conversations."""
        assert self.chats.train is not None
        return [self.chats.train.names[chat] for row in self._chosen(step, shard) for chat in row]

    def loss(self, model: gpt.GPT, batch: TokenWindows) -> SummedLoss:
        """Sum of cross entropies of the answers' tokens in nats, and their number; of preferences, see `dpo`."""
        if isinstance(self.tune, Dpo):
            losses = dpo.losses(model, batch, self.tune.beta).loss
            return losses.sum(), torch.tensor(len(losses))
        return model.loss_sum(*batch), (batch.targets != IGNORED).sum()

    def validation_samples(self) -> int:
        """Held-out rows or pairs, up to `train.validate_tokens`."""
        each = self.sequence * (dpo.ROWS if self.pairs else 1)
        return min(len(self.held_rows), max(1, (self.recipe.train.validate_tokens or VALIDATE_TOKENS) // each))

    def _held_out(self, start: int, stop: int, shard: Shard) -> TokenWindows:
        return self._batch(self.chats.held_out, self.held_rows[start:stop], shard)

    def _figures(self, model: gpt.GPT, batch: TokenWindows) -> Sums:
        """Of answers as of text; of preferences `loss`, `margin`, `preferred`."""
        if not isinstance(self.tune, Dpo):
            return super()._figures(model, batch)
        losses = dpo.losses(model, batch, self.tune.beta)
        return {name: (float(figure.sum()), float(len(figure))) for name, figure in losses._asdict().items()}

    def summary(self, totals: Averages) -> Averages:
        """Of answers loss, bits per byte and perplexity; of preferences what `evaluate` gives."""
        return totals if self.pairs else super().summary(totals)

    def sample(self, model: gpt.GPT) -> list[Artifact]:
        """An answer to the first held-out question, or to `track.sample`."""
        held_out = self.chats.held_out
        asked = self.recipe.track.sample
        if isinstance(asked, str):
            start = self.prompt([("user", asked)])
        else:
            tokens = held_out.tokens[: held_out.starts[1]]
            answers = held_out.answers[: held_out.starts[1]]
            start = tokens[: int(np.flatnonzero(answers)[0])].tolist()
        decoding = generate.Decoding(model, [start], [Sampling(tokens=100)])
        pieces = generate.write(decoding, self.tokenizer, self.endings)
        return [Text(self.tokenizer.decode(start) + "".join(piece.text for piece in pieces))]

    # --- chatting ------------------------------------------------------------------------------------------------

    def prompt(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """The tokens up to the next answer of a chat of (role, text)."""
        text = self.chats.template.render([Turn(*turn) for turn in turns], answering=True)
        return [int(token) for token in self.tokenizer.encode_marked([text])[0][0]]

    @property
    def endings(self) -> list[list[int]]:
        """What ends an answer: the first special token after it, else all that the template puts there; and what ends
        any text."""
        ids = [int(token) for token in self.tokenizer.encode_marked([self.chats.template.ending])[0][0]]
        special = _special_tokens(self.tokenizer, {*ids})
        answer = next(([token] for token in ids if token in special), ids)
        endings = [answer, *([token] for token in self.tokenizer.ends())]
        return [ending for ending in endings if ending] or [[self.tokenizer.boundary]]

    def question(self, text: str) -> list[int]:
        """The prompt that asks `text`."""
        return self.prompt([("user", text)])

    # --- what is said and compared -------------------------------------------------------------------------------

    def freeze(self, folder: Path) -> None:
        """Writes what `thaw` reads: the tokenizer, the template, the held-out conversations, and frozen weights."""
        self.tokenizer.files.keep(folder)
        (folder / FILE).write_text(self.chats.template.text, encoding="utf-8")
        (folder / _HELD_OUT).write_bytes(chat_rows.dumps(self.chats.held_out))
        if isinstance(self.tune, Adapters) and self.options.initial is not None:
            hf.copy(Path(self.options.initial), folder / BASE)
        if isinstance(self.tune, Lora) and self.tune.adapter is not None:
            (folder / ADAPTER).mkdir()
            for name in (peft.CONFIG, peft.WEIGHTS):
                shutil.copyfile(Path(self.tune.adapter) / name, folder / ADAPTER / name)

    def contents(self, recipe: Recipe) -> Mapping[str, str]:
        """Hashes of the files of all `[[data]]` in `recipe`; a source without files has one of the tokens."""
        hashes: dict[str, str] = {}
        for data in recipe.data:
            hashes |= text_sources.content_hashes(data) or {data.path: self.fingerprint()}
        return hashes

    def fingerprint(self) -> str:
        """Of both sides, and of what tokens are answers."""
        each = [chats.fingerprint for chats in (self.chats.train, self.chats.held_out) if chats is not None]
        return "-".join([self.tokenizer.fingerprint, *each])

    def notes(self) -> list[str]:
        """What was left out, how full the rows are, and one conversation with its answers between marks."""
        adapter = self.tune.adapter if isinstance(self.tune, Lora) else None
        return [*self.weight_notes(), *([] if adapter is None else peft.notes(Path(adapter))), *self.chats.notes]


def adapted(model: gpt.GPT, recipe: Recipe, fill: lora.Fill | None = None) -> gpt.GPT:
    """`model` as `recipe.tune` trains it: with adapters, with a reference, or as it is. `fill`: see `lora.adapt`."""
    tune = recipe.tune
    scored = row_log_probability if isinstance(tune, Dpo) else answer_loss
    model.score = partial(scored, cap=model.size.logit_cap)
    if isinstance(tune, Adapters) and tune.rank:
        model = lora.adapt(model, tune, recipe.train.seed, fill)
        if isinstance(tune, Lora) and tune.adapter is not None and not model.embedding.weight.is_meta:
            peft.load(model, Path(tune.adapter), f"model.initial = {recipe.model.initial!r}")  # type: ignore[attr-defined]
        return model
    return dpo.with_reference(model) if isinstance(tune, Dpo) else model


def batch_of(recipe: Recipe) -> int:
    """Rows, or pairs, in a global batch."""
    assert recipe.train.batch_tokens is not None
    assert recipe.train.sequence is not None
    rows = recipe.train.batch_tokens // recipe.train.sequence
    return max(1, rows // dpo.ROWS) if isinstance(recipe.tune, Dpo) else rows


# --- opening -----------------------------------------------------------------------------------------------------


class ReadChats(NamedTuple):
    """The conversations of a recipe before its sequence is known."""

    tokenizer: Tokenizer
    template: ChatTemplate
    chats: Sequence[ChatTokens]


def read(recipe: Recipe, tokenizer: Tokenizer | None, run: Path | None, progress: Progress | None) -> ReadChats:
    """Reads all `[[data]]`; `tokenizer`: None for that of the recipe. Raises UserError."""
    assert recipe.tune is not None
    tokenizer = tokenizer or open_tokenizer(recipe.data[0].tokenizer)
    if any(source.weight != 1 for source in recipe.data):
        raise UserError(
            "data.weight is not possible with [tune].", why="an epoch takes every conversation once", do="leave it out"
        )
    template = open_template(recipe.tune.template, tokenizer, run)
    pairs = isinstance(recipe.tune, Dpo)
    chats = [chat_rows.read(source, tokenizer, template, pairs, progress) for source in recipe.data]
    return ReadChats(tokenizer, template, chats)


def chats_of(recipe: Recipe, chats: ReadChats) -> ConversationSplit:
    """Both sides of the conversations. Raises UserError where nothing fits into `train.sequence`."""
    assert recipe.tune is not None
    assert recipe.train.sequence is not None
    sides = [
        chat_rows.divided(tokens, data.validation, recipe.train.sequence, recipe.tune.longer)
        for tokens, data in zip(chats.chats, recipe.data, strict=True)
    ]
    train = chat_rows.joined([side[0] for side in sides])
    held_out = chat_rows.joined([side[1] for side in sides])
    notes = [*(note for side in sides for note in side[2]), *_notes(chats, train)]
    return ConversationSplit(chats.tokenizer, chats.template, train, held_out, notes)


def _notes(chats: ReadChats, train: ChatTokens) -> list[str]:
    skipped = [row for source in chats.chats for row in source.skipped]
    notes = [note for source in chats.chats for note in source.notes]
    if skipped:
        notes.append(f"{len(skipped)} conversations are left out ({row_files.summary(skipped)})")
    shown_rows = preview(chats.tokenizer, train)
    notes.append(
        f"{len(train):,} conversations of {len(train.tokens):,} tokens by the template of {chats.template.origin}; the "
        f"loss is on the {train.answers.mean():.0%} of them that are answers, between ⟦ and ⟧ in {shown_rows[0]}"
    )
    return [*notes, *(f"between ⟦ and ⟧ in {row}" for row in shown_rows[1:])]


def preview(tokenizer: Tokenizer, chats: ChatTokens) -> list[str]:
    """The first conversation, the longest, and the one with the most unused keys, with their answers between marks."""
    longest = int(np.argmax(chats.lengths))
    strangest = int(np.argmax(chats.unused or [0]))
    labels = {strangest: "the one with the most that is not used", longest: "the longest", 0: "this one"}
    return [f"{labels[number]}: {shown(tokenizer, chats, number)}" for number in dict.fromkeys([0, longest, strangest])]


def shown(tokenizer: Tokenizer, chats: ChatTokens, number: int, most: int = 1000) -> str:
    """A conversation with its special tokens, and its answers between ⟦ and ⟧."""
    start = int(chats.starts[number])
    stop = int(chats.starts[number + 1])
    special = _special_tokens(tokenizer, {int(token) for token in chats.tokens[start:stop]})
    text = ""
    for answer, group in groupby(range(start, stop), lambda place: bool(chats.answers[place])):
        runs = groupby((int(chats.tokens[place]) for place in group), special.get)
        part = "".join(tokenizer.decode(ids) if name is None else name * len(list(ids)) for name, ids in runs)
        text += f"⟦{part}⟧" if answer else part
    cut = text[:most] + ("…" if len(text) > most else "")
    return f"{chats.names[number]} " + json.dumps(cut, ensure_ascii=False)


def _special_tokens(tokenizer: Tokenizer, tokens: set[int]) -> dict[int, str]:
    """Those of `tokens` that decode to nothing, as special ones do, by their names."""
    before = [*tokenizer.encode(b"a")]
    hidden = {token for token in tokens if tokenizer.decode([*before, token]) == tokenizer.decode(before)}
    return {token: name for name, token in tokenizer.table().items() if token in hidden}


def thaw(recipe: Recipe, folder: Path) -> ConversationSplit:
    """What `TuneWorkload.freeze` wrote into `folder`."""
    tokenizer = kept_tokenizer(recipe.data[0].tokenizer, folder)
    held_out = chat_rows.loads((folder / _HELD_OUT).read_bytes(), isinstance(recipe.tune, Dpo))
    return ConversationSplit(tokenizer, open_template(None, tokenizer, folder), None, held_out)


def plain(model: gpt.GPT) -> gpt.GPT:
    """A decoder without adapters and reference that computes what `model` does."""
    if dpo.REFERENCE not in model._modules and not lora.layers(model):
        return model
    copied = copy.deepcopy(model)
    copied._modules.pop(dpo.REFERENCE, None)
    for name, layer in [*copied.named_modules()]:
        if isinstance(layer, lora.LoraLinear | lora.CompressedLinear):
            parent, _, child = name.rpartition(".")
            whole = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            matrix = layer.merged() if isinstance(layer, lora.LoraLinear) else layer.dense()
            whole.weight = nn.Parameter(matrix)
            whole.bias = layer.bias
            setattr(copied.get_submodule(parent), child, whole)
    for table in {copied.embedding.weight, copied.words}:
        table.data = table.data.to(next(copied.norm.parameters()).dtype)
    copied.embedding.__class__ = nn.Embedding
    copied.score = partial(gpt.score, cap=copied.size.logit_cap)
    copied._state_dict_hooks.clear()
    copied._load_state_dict_post_hooks.clear()
    return copied.requires_grad_(True)
