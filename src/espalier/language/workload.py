"""The Workload Protocol's answer for language: token windows in a global order, next-token loss, bits per byte."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.language import gpt, mixture, row_files, text_sources, token_store
from espalier.language.decoder_workload import DecoderWorkload, RowBatch, TokenWindows
from espalier.language.tokenizer import Tokenizer, kept_tokenizer
from espalier.parallel.workload import Progress, Shard, SummedLoss
from espalier.recipe import Recipe
from espalier.recipe.errors import UserError
from espalier.recipe.sections import VALIDATE_TOKENS
from espalier.recipe.units import plural
from espalier.store.artifacts import Artifact, Text

FREE, OFTEN = 4, 16
"""Passes over a text: that cost next to nothing, and that are told (Muennighoff et al., arXiv 2305.16264)."""


class StoredCorpus(NamedTuple):
    """What a run keeps of its corpus: the tokenizer, and the held-out windows, [windows, sequence + 1]."""

    tokenizer: Tokenizer
    windows: NDArray[Any]


class LanguageWorkload(DecoderWorkload):
    """One decoder, one mixture of corpora: their `stores`, or what a `run` kept of them, which is evaluated but not
    trained on."""

    def __init__(
        self, recipe: Recipe, stores: Sequence[token_store.TokenStore], run: StoredCorpus | None = None
    ) -> None:
        super().__init__(recipe, stores[0].tokenizer if run is None else run.tokenizer)
        self.stores = stores
        self._kept = run
        self.splits = [store.train for store in stores]
        weights = [source.weight for source in recipe.data]
        names = [source.path for source in recipe.data]
        counts = [split.tokens for split in self.splits]
        self.packed = _packed(recipe)
        self.order = mixture.SampleOrder(counts, weights, self.sequence, recipe.train.seed, names) if stores else None
        self.held_out: list[tuple[token_store.TokenSplit, int]] = []
        """(split, first token) of every held-out window, each corpus by its weight."""
        for store, name, weight in zip(stores, names, weights, strict=run is None):
            limit = round((recipe.train.validate_tokens or VALIDATE_TOKENS) * weight / sum(weights))
            starts = mixture.held_out(store.validation, self.sequence, limit, name)
            self.held_out += [(store.validation, int(start)) for start in starts]

    # --- the data ------------------------------------------------------------------------------------------------

    def _part(self, rows: Tensor, shard: Shard) -> TokenWindows:
        """What a rank that holds one slot of the sequence takes of windows, [samples, sequence + 1]."""
        tokens = rows[:, :-1]
        targets = rows[:, 1:]
        if shard.sequence_slots == 1 and not self.packed:
            return TokenWindows(tokens, targets)
        positions = torch.arange(tokens.shape[1])
        documents = None
        if self.packed:
            begins = tokens == self.tokenizer.boundary
            documents = begins.cumsum(1)
            positions = positions - torch.where(begins, positions, 0).cummax(1).values
        return RowBatch(tokens, targets, positions, documents).part(shard)

    def batches(self, step: int, shard: Shard) -> list[TokenWindows]:
        """Windows of the global order, cut into micro-batches."""
        first = step * self.global_batch
        assert self.order is not None, "a run that is only evaluated has no training data"
        rows = mixture.read_windows(self.splits, self.order, first + shard.start, first + shard.stop)
        windows = torch.from_numpy(rows)
        return [self._part(windows[start - shard.start : stop - shard.start], shard) for start, stop in shard.cuts]

    def documents(self, step: int, shard: Shard) -> list[str]:
        """Names of the documents those windows cover."""
        first = step * self.global_batch
        assert self.order is not None
        return mixture.documents(self.splits, self.order, first + shard.start, first + shard.stop)

    def loss(self, model: gpt.GPT, batch: TokenWindows) -> SummedLoss:
        """Sum of cross entropies in nats, and the number of tokens."""
        return model.loss_sum(*batch), torch.tensor(batch.targets.numel())

    def validation_samples(self) -> int:
        """Held-out windows."""
        return len(self.held_out if self._kept is None else self._kept.windows)

    def _held_out(self, start: int, stop: int, shard: Shard) -> TokenWindows:
        return self._part(self._read_held_out(start, stop), shard)

    def _read_held_out(self, start: int, stop: int) -> Tensor:
        if self._kept is not None:
            return torch.from_numpy(self._kept.windows[start:stop].astype(np.int64))
        chosen = self.held_out[start:stop]
        rows = [split.read(first, self.sequence + 1).astype(np.int64) for split, first in chosen]
        return torch.from_numpy(np.stack(rows))

    def sample(self, model: gpt.GPT) -> list[Artifact]:
        """A short continuation of `track.sample` (or of the first held-out words)."""
        prompt = self.recipe.track.sample
        ends = (self.tokenizer.boundary, *self.tokenizer.document_end)
        start = self.text_prompt(prompt) if isinstance(prompt, str) else self._read_held_out(0, 1)[0, :32].tolist()
        from espalier.language import generate

        fresh = generate.generate(model, torch.tensor(start), tokens=200, temperature=0.8, top_k=40, seed=1)
        return [Text(self.tokenizer.decode([token for token in (*start, *fresh) if token not in ends]))]

    def question(self, text: str) -> list[int]:
        """The prompt that `text` is the beginning of."""
        return self.text_prompt(text)

    def prompt(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Refuses turns."""
        raise UserError(
            "The run was trained on plain text, which has no turns.",
            why="a chat template says where questions and answers begin",
            do="a recipe with [tune] (docs/tune.md), or espalier predict RUN 'text to go on from'",
        )

    def freeze(self, folder: Path) -> None:
        """Writes the tokenizer, as Hugging Face reads it, and the held-out windows: what `thaw` reads."""
        self.tokenizer.files.keep(folder)
        count = self.validation_samples()
        windows = self._read_held_out(0, count).numpy() if count else np.zeros((0, self.sequence + 1))
        with (folder / _WINDOWS).open("wb") as file:
            np.save(file, windows.astype(self.tokenizer.dtype))

    def contents(self, recipe: Recipe) -> Mapping[str, str]:
        """Hashes of the files of the corpora in `recipe`; a corpus without files has one of its tokens."""
        hashes: dict[str, str] = {}
        for data, store in zip(recipe.data, self.stores, strict=True):
            hashes |= text_sources.content_hashes(data) or {data.path: store.fingerprint}
        return hashes

    def fingerprint(self) -> str:
        """Of every corpus and its tokenizer."""
        return "-".join(store.fingerprint for store in self.stores)

    def notes(self) -> list[str]:
        """What the stores say, and which documents they skipped."""
        notes = [*self.weight_notes(), *(note for store in self.stores for note in store.notes)]
        for store in self.stores:
            if count := store.skipped_documents:
                unit = "row" if all(_ROW.search(name) for name, _ in store.skipped) else "file"
                was = f"{plural(count, unit)} {'was' if count == 1 else 'were'} skipped in {store.origin}"
                first = f"of the first {len(store.skipped):,} " if count > len(store.skipped) else ""
                notes.append(f"{was} ({first}{row_files.summary(store.skipped)})")
            notes += _split_documents(store, self.sequence) if self.packed else []
        steps, batch = self.recipe.train.steps or 0, self.recipe.train.batch_tokens or 0
        tokens = sum(split.tokens for split in self.splits)
        if steps * batch > OFTEN * tokens > 0:
            fewer = max(1, FREE * tokens // batch)
            notes.append(
                f"{steps:,} steps of {batch:,} tokens read the text's {tokens:,} tokens {steps * batch / tokens:,.0f} "
                f"times. Up to {FREE} times is nearly as good as new text (train.steps={fewer}); beyond {OFTEN} little "
                "is gained (arXiv 2305.16264)."
            )
        return notes


def open_language(
    recipe: Recipe, progress: Progress | None = None, tokenizer: Tokenizer | None = None
) -> LanguageWorkload:
    """Builds (or finds) the token shards of every source. `recipe` must be resolved. Raises UserError."""
    if not recipe.data:
        raise UserError("The recipe has no [data].", do='[data] path = "python:stdlib"')
    return LanguageWorkload(recipe, token_store.build_all(recipe.data, progress=progress, tokenizer=tokenizer))


def thaw(recipe: Recipe, folder: Path) -> StoredCorpus:
    """What `LanguageWorkload.freeze` wrote into `folder`."""
    return StoredCorpus(kept_tokenizer(recipe.data[0].tokenizer, folder), np.load(folder / _WINDOWS))


_WINDOWS = "held_out.npy"
_ROW = re.compile(r":\d+$")  # ends the name of a row


def _split_documents(store: token_store.TokenStore, sequence: int) -> list[str]:
    """Says how many packed documents do not fit into a window; empty: all of them do."""
    longer, longest = store.train.longer_documents(sequence)
    if not longer:
        return []
    have = "document has" if longer == 1 else "documents have"
    return [
        f"{longer} of {store.train.documents} {have} more than train.sequence = {sequence} tokens in {store.origin} "
        f"(the longest {longest}): they are split at the ends of windows, and no token sees another window. "
        f"train.sequence={longest} holds the longest"
    ]


def _packed(recipe: Recipe) -> bool:
    """Whether tokens see their own document only. Raises UserError where sources differ in that."""
    packings = {source.packing for source in recipe.data}
    if len(packings) > 1:
        raise UserError("The [[data]] tables differ in packing.", do='packing = "documents" in all of them, or in none')
    return packings == {"documents"}
