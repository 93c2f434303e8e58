"""What a model of several tasks says: of held-out samples of a task, or to a text that it goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from espalier.module.parts import Task, collated, length
from espalier.parallel.workload import to_device
from espalier.radiance.workload import CHUNK, byte, psnr
from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import UserError
from espalier.store import artifacts
from espalier.tasks.sources import SceneRays
from espalier.tasks.towers import Fields, Head, MultitaskModel, TowerModule
from espalier.train.workload_row import Answer, Sampling


def answer(
    tasks: Mapping[str, Task], batches: Sequence[int], model: MultitaskModel, asked: str | None, sampling: Sampling
) -> Answer:
    """See `Row.answer`. `batches`: samples of each task's.

    `asked`: `TASK`, `TASK NUMBER` (of a held-out sample), or text for the task that goes on from text; None: the first
    sample of every task.

    Raises UserError where there is no such sample, or no task goes on from text.
    """
    names = [task.name for task in model.tasks]
    word, _, number = (asked or "").strip().partition(" ")
    wanted = [(names.index(word), number.strip() or "0")] if word in names else []
    if asked is None:
        wanted = [(task, "0") for task in range(len(names))]
    with torch.no_grad():
        if wanted:
            answers = [_of_sample(tasks, batches, model, task, number) for task, number in wanted]
            return Answer(iter([f"{sample['text']}\n" for sample in answers]), lambda: {"answers": answers})
        assert asked is not None
        writers = [
            k
            for k, task_of_model in enumerate(model.tasks)
            if task_of_model.loss == "next_token" and len(model.nodes(k)) == 2
        ]
        if not writers or not asked:
            raise UserError(
                f"{asked!r} is no task of this run.",
                why=f"its tasks are {', '.join(names)}"
                + ("" if writers else "; none of them goes on from text without other inputs"),
                do=f"espalier predict RUN {names[0]!r}, or '{names[0]} 3' for another held-out sample",
            )
        text = asked + "".join(_written(model, writers[0], asked.encode(), {}, sampling))
    return Answer(iter([f"{text}\n"]), lambda: {"task": names[writers[0]], "text": text})


def _of_sample(
    tasks: Mapping[str, Task], batches: Sequence[int], model: MultitaskModel, task: int, number: str
) -> dict[str, Any]:
    """What the task says of one held-out sample."""
    name = model.tasks[task].name
    loss = model.tasks[task].loss
    samples = tasks[name].held_out
    size = len(samples.views) if isinstance(samples, SceneRays) else length(samples) if samples is not None else 0
    if samples is None or not number.isdecimal() or int(number) >= size:
        raise UserError(f"{name} has no held-out sample {number!r}.", do=f"a number below {size}")
    at = int(number)
    if isinstance(samples, SceneRays):
        return _rendered(model, task, samples, at)
    first = min(at, max(0, size - batches[task]))
    indices = range(first, min(size, first + batches[task])) if loss == "contrastive" else range(at, at + 1)
    device = next(model.parameters())
    fields = to_device(collated(samples, indices), device.device, dtype=device.dtype)
    if loss == "next_token":
        text = bytes(fields["text"][0].tolist())
        begun = text[: len(text) // 2]
        others = {key: value for key, value in fields.items() if key != "text"}
        made = "".join(_written(model, task, begun, others, Sampling(tokens=len(text) - len(begun) - 1)))
        shown = begun.decode("utf-8", "replace")
        right = text.decode("utf-8", "replace")
        return {"task": name, "sample": at, "begin": shown, "right": right, "text": f"{name} {at}: {shown}{made}"}
    outputs = _outputs(model, task, fields)
    head = cast("Head", model.heads[name])
    if loss == "classes":
        scores = head.out[0](outputs[0][:, 0] if "nodes" in fields else outputs[0].mean(1))[0].softmax(-1)
        best = int(scores.argmax())
        label = int(fields["label"][0])
        words = f"{name} {at}: class {best} ({float(scores[best]):.0%}), labelled {label}"
        return {"task": name, "sample": at, "class": best, "label": label, "share": float(scores[best]), "text": words}
    first_side, other = head.compared(outputs)
    picked = int((first_side[at - first] @ other.T).argmax()) + first
    words = f"{name} {at}: of {len(first_side)} it picks {_named(fields, picked - first) or picked}"
    words += ", which is right" if picked == at else f"; right is {_named(fields, at - first) or at}"
    return {"task": name, "sample": at, "picked": picked, "among": len(first_side), "text": words}


def _rendered(model: MultitaskModel, task: int, held_out: SceneRays, at: int) -> dict[str, Any]:
    """A held-out view, written into a PNG file here, and how near it is to the truth."""
    name = model.tasks[task].name
    device = next(model.parameters())
    rays = held_out.view(at)
    parts = [
        {key: field[start : start + CHUNK] for key, field in rays.items()}
        for start in range(0, len(rays["rays"]), CHUNK)
    ]
    made = (_outputs(model, task, to_device(part, device.device, device.dtype))[0] for part in parts)
    colours = torch.cat([field[:, 0, :3].cpu() for field in made])
    file = f"{name}-{at}.png"
    picture = byte(colours).view(held_out.scene.lens.height, held_out.scene.lens.width, 3)
    with writing(file, "go to another working directory"):
        Path(file).write_bytes(artifacts.encode(picture.numpy()))
    ratio = psnr(float((colours - rays["colour"]).square().mean()))
    text = f"{name} {at}: {file}, PSNR {ratio:.2f} dB"
    return {"task": name, "sample": at, "image": file, "psnr": ratio, "text": text}


def _named(fields: Fields, row: int) -> str:
    """The text of a sample, where it has one."""
    text = fields.get("text")
    return "" if text is None else repr(bytes(text[row].tolist()).rstrip(b"\0").decode("utf-8", "replace"))


def _outputs(model: MultitaskModel, task: int, fields: Fields) -> list[Tensor]:
    outputs = model.run(task, model.nodes(task)[:-1], fields)
    return [outputs[name] for name in model.tasks[task].towers]


def _written(
    model: MultitaskModel, task: int, begun: bytes, others: Mapping[str, Tensor], sampling: Sampling
) -> Iterator[str]:
    """Pieces that follow `begun`. A window has a place less than in training, where the last one predicts nothing."""
    options = model.tasks[task]
    tower = cast("TowerModule", model.towers[options.towers[0]])
    head = cast("Head", model.heads[options.name])
    size = len(tower.places)
    text = bytearray(begun)
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.tokens):
        window = text[-(size - 1) :]
        row = torch.tensor([[*window, *(0,) * (size - len(window))]], device=next(model.parameters()).device)
        output = _outputs(model, task, {**others, "text": row})[0]
        scores = head.out[0](output[:, -size:])[0, max(0, len(window) - 1)].float().cpu()
        text.append(_drawn(scores, sampling, generator))
    yield bytes(text[len(begun) :]).decode("utf-8", "replace")


def _drawn(scores: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature <= 0:
        return int(scores.argmax())
    best, places = (scores / sampling.temperature).topk(min(sampling.top_k or len(scores), len(scores)))
    return int(places[int(torch.multinomial(best.softmax(-1), 1, generator=generator))])
