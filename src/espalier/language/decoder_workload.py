"""The half of a language workload that says how its decoder is built, cut and counted; the other half is its data."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from espalier.kernels.linear_cross_entropy import IGNORED
from espalier.language import gpt
from espalier.language.operation_counts import DecoderLoad
from espalier.language.tokenizer import Tokenizer
from espalier.parallel.attend import Where
from espalier.parallel.sequence_slots import SequenceSlots, shares_of
from espalier.parallel.workload import Averages, Pieces, Plain, Role, Shard, Skeleton, Sums, to_device
from espalier.recipe import Decoder, Gpt, Moe, Recipe
from espalier.recipe.cost import Anatomy, Work
from espalier.recipe.decoder_shapes import sizes
from espalier.recipe.errors import UserError


class TokenWindows(NamedTuple):
    """A micro-batch: tokens int64 [batch, sequence], what follows each of them, int64 [batch, sequence], and where they
    stand (None: each row is whole and one document)."""

    tokens: Tensor
    targets: Tensor
    where: Where | None = None


class RowBatch(NamedTuple):
    """Whole rows of a batch, each int64 [rows, sequence]; positions may be [sequence]. `documents`: see `Where`."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None = None

    def part(self, shard: Shard) -> TokenWindows:
        """What a rank that holds one slot of the sequence takes of them."""
        heads = shard.sequence_heads
        shares = shares_of(shard.sequence_speeds, heads)
        slots = SequenceSlots(self.tokens.shape[1], shard.sequence_slots // heads, heads, True, *shares)
        local = [slots.take(tensor, shard.sequence_slot) for tensor in self[:3]]
        return TokenWindows(local[0], local[1], Where(local[2], self.documents, slots))


class DecoderWorkload(Plain):
    """The answers of the Workload Protocol that know of the model only. `recipe` is resolved. `measured`: names of what
    `evaluate` gives."""

    measured: Sequence[str] = ("loss", "nats_per_byte")

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        assert isinstance(recipe.model, Decoder)
        assert recipe.train.sequence is not None
        assert recipe.train.batch_tokens is not None
        self.recipe = recipe
        self.options = recipe.model
        self.initial = recipe.model.initial
        self.sequence = recipe.train.sequence
        self.global_batch = recipe.train.batch_tokens // self.sequence
        self.nominal_weight = float(self.global_batch * self.sequence)
        self.tokenizer = tokenizer
        self._byte_lengths = torch.from_numpy(tokenizer.byte_lengths.astype(np.float64))
        rows = self.options.vocabulary
        if rows is not None and tokenizer.vocabulary > rows:
            raise UserError(
                f"data.tokenizer = {tokenizer.name!r} has {tokenizer.vocabulary} tokens, and the model's table has "
                f"{rows}.",
                why="a token without a row in the table cannot be read",
                do="leave model.vocabulary out, or the tokenizer that the weights were trained with",
            )

    @property
    def exported_tokenizer(self) -> Tokenizer:
        """The tokenizer with the chat template that belongs to the model."""
        return self.tokenizer

    @property
    def endings(self) -> list[list[int]]:
        """The tokens that end a text."""
        return [[self.tokenizer.boundary], *([token] for token in self.tokenizer.document_end)]

    def build(self, device: torch.device, dtype: torch.dtype) -> gpt.GPT:
        """The decoder, initialised from the seed or from `model.initial` (a Llama-format folder)."""
        model = new_model(self.options, self.recipe.train.seed, device)
        if self.options.initial is not None:
            from espalier.language import hf

            hf.load_into(model, Path(self.options.initial))
        return model.to(dtype)

    def text_prompt(self, text: str) -> list[int]:
        """The tokens of a document that begins with `text`."""
        return [self.tokenizer.boundary, *(int(token) for token in self.tokenizer.encode(text.encode()))]

    def skeleton(self) -> Skeleton:
        """The decoder on the meta device but for its positions, and its weights one by one."""
        seed = self.recipe.train.seed
        model = new_model(self.options, seed, torch.device("meta"))
        model.rotation.to_empty(device="cpu")
        if self.options.initial is not None:
            from espalier.language import hf

            return Skeleton(model, hf.weights_of(model, Path(self.options.initial)))
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

        def value(name: str) -> Tensor:
            drawn = torch.empty(shapes[name])
            gpt.initialise(model, seed, {name: drawn})
            return drawn

        return Skeleton(model, value)

    def weight_notes(self) -> list[str]:
        """What of the weights that training begins with is not used, or read as something else."""
        if self.options.initial is None:
            return []
        try:
            from espalier.language import hf

            return hf.notes(self.options.initial)
        except UserError:  # of a run that goes on from a checkpoint: the weights may be gone
            return []

    def blocks(self, model: gpt.GPT) -> Sequence[nn.Module]:
        """The decoder's layers."""
        return list(model.blocks)

    def pieces(self, model: gpt.GPT) -> Pieces | None:
        """The table, the layers, and the last norm with the head."""
        return model.pieces()

    def roles(self, model: gpt.GPT) -> Mapping[str, Role] | None:
        """Heads, the feed-forward's columns and the vocabulary are divided; norms see each rank's tokens."""
        return gpt.roles(model)

    def embeddings(self, model: gpt.GPT) -> Sequence[nn.Parameter]:
        """The token table and the head."""
        return embeddings(model)

    @abstractmethod
    def _held_out(self, start: int, stop: int, shard: Shard) -> TokenWindows:
        """Held-out samples `[start, stop)`, what `shard` takes of them."""

    def evaluate(self, model: gpt.GPT, shard: Shard) -> Sums:
        """`loss` in nats per token, and `nats_per_byte`: the same sum over the bytes those tokens stand for."""
        device = next(model.parameters()).device
        sums = dict.fromkeys(self.measured, (0.0, 0.0))
        for start, stop in shard.cuts:
            batch = to_device(self._held_out(start, stop, shard), device)
            for name, (total, weight) in self._figures(model, batch).items():
                sums[name] = (sums[name][0] + total, sums[name][1] + weight)
        return sums

    def _figures(self, model: gpt.GPT, batch: TokenWindows) -> Sums:
        nats = float(model.loss_sum(*batch))
        targets = batch.targets[batch.targets != IGNORED].cpu()
        return {"loss": (nats, float(len(targets))), "nats_per_byte": (nats, float(self._byte_lengths[targets].sum()))}

    def recompute(self, model: gpt.GPT, mode: str) -> None:
        """Activation checkpointing of the layers."""
        gpt.recompute(model, mode)

    def summary(self, totals: Averages) -> Averages:
        """Loss, bits per byte and perplexity."""
        loss = totals["loss"]
        return {
            "loss": loss,
            "bits_per_byte": totals["nats_per_byte"] / math.log(2),
            "perplexity": math.exp(min(loss, 700.0)),
        }

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        """See the model's own `work`."""
        load = DecoderLoad(sizes(self.options), self.sequence, micro_batch, recompute, precision)
        return work_of(self.options)(load).whole


def work_of(options: Decoder) -> Callable[[DecoderLoad], Anatomy]:
    """What counts the work of a decoder of `options`."""
    if isinstance(options, Gpt):
        return gpt.work
    from espalier.language import moe

    return moe.work


def new_model(options: Decoder, seed: int, device: torch.device) -> gpt.GPT:
    """The decoder of resolved `options`; its weights are filled from `seed` unless `device` is meta."""
    make = gpt.GPT
    if isinstance(options, Moe):
        from espalier.language import moe

        make = moe.MOE
    with torch.device(device):
        model = make(options)
    if device.type != "meta":
        gpt.initialise(model, seed)
    return model


def embeddings(model: gpt.GPT) -> list[nn.Parameter]:
    """The token table and, unless tied to it, the head."""
    layers = [model.embedding, model.head]
    return [parameter for layer in layers if layer is not None for parameter in layer.parameters()]
