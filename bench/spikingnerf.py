"""SpikingNeRF: picture quality, energy, time and memory of spiking colours, beside a plain network and other libraries.

    python bench/spikingnerf.py [--quick] [--pairs N] [--json FILE] [--scene FOLDER] [--only CASES] [--picture FILE]
        [--keep FOLDER [--kept]]

`quality` fits fields of both scenes (`--scene`, a folder in Blender's layout, else `spheres:`; and `knot:`) on several
seeds, two fits at a time on a core each; a spiking one also for twice the steps. `--picture` writes a test view of each
scene as PNG: the truth, plain, spiking, and spiking after twice the steps. `dram` adds the traffic of DRAM to the
energy of these fields. `penalty` fits fields whose spikes are penalized, `alignments` compares the orders in which
samples are time steps, `peers` fields that are trained with SpikingJelly's and snnTorch's neurons. These five time
nothing: they may run beside other work and in pieces, where `--keep` holds what is fitted; with `--kept` nothing more
is fitted, and rows are of the seeds that are there. `heads` times a training step of the colour network alone on the
samples of a field of each scene, with what it keeps for backward and has in tensors at most: ours, SpikingJelly's and
snnTorch's neurons on padded rays (peers are left out where they cannot be imported), and rendering by the kernel that
adds the rows of neurons that fire (with GOMP_SPINCOUNT=20000 in the environment, as a run sets it). `steps` times a
whole training step, plain and spiking, `gradients` counts bytes of their exchange between two ranks, `long` fits plain
fields beyond 30 dB and spiking ones for twice the steps (it times nothing, and may be kept). `train` is `espalier
train`, plain and spiking.
Energy is the paper's formula, 4.6 pJ a multiplication and 0.9 pJ an accumulation: a model, not a measurement.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from espalier.comm import codecs, compressed_collectives
from espalier.kernels import counts
from espalier.optim import schedules
from espalier.parallel.workload import Shard
from espalier.radiance import spikingnerf
from espalier.radiance.spikingnerf import SpikingColours, lif_scan
from espalier.radiance.volume_rendering import RaySamples
from espalier.radiance.voxels import VIEW, Field
from espalier.radiance.workload import RadianceWorkload, psnr
from espalier.recipe import recipe_file
from espalier.store import artifacts
from espalier.train import workload_registry
from spikingnerf_heads import PEERS, PaddedColours, head_step, kept_by, peak_of, survivors, there, timed, whole_step
from table import Row, arguments, compare, interval, publish

GOAL = 30.0
"""Decibels."""
RAYS = 512
"""Of a step, where nothing else is said."""
PENALTY = 1e-3
"""`model.spike_penalty` of the case of that name."""


@dataclass(frozen=True)
class Fit:
    """A field to be fitted: which network, of what, how long."""

    kind: str
    scene: str
    seed: int
    steps: int
    width: int
    resolution: int
    alignment: str = "tcp"
    flip: bool = False
    peer: str = ""
    rays: int = RAYS
    penalty: float = 0.0


@dataclass(frozen=True)
class Found:
    """PSNR, mean of the test views; of one image: joules without and with one product of directions a ray, and of all
    that is computed without and with the traffic of DRAM; spikes of a neuron and sample in both layers; operations on
    spikes; the first test view beside the truth, uint8 [height, 2 * width, 3]."""

    psnr: float
    joules: float
    hoisted: float
    counted: float
    moved: float
    rates: tuple[float, float]
    sops: float
    view: Any = field(repr=False, compare=False)


# --- fits --------------------------------------------------------------------------------------------------------


def opened(fit: Fit) -> RadianceWorkload:
    """The workload of a fit."""
    options = [f"model.kind={fit.kind}", f"data.path={fit.scene}", f"train.seed={fit.seed}", f"train.steps={fit.steps}"]
    options += [f"train.batch_tokens={fit.rays}", f"model.width={fit.width}", f"model.resolution={fit.resolution}"]
    if fit.kind == "spikingnerf":
        options += [f"model.alignment={fit.alignment}", f"model.flip={str(fit.flip).lower()}"]
        options += [f"model.spike_penalty={fit.penalty}"]
    example = Path(__file__).parents[1] / "examples" / "scene.toml"
    found = workload_registry.open_workload(workload_registry.settle(recipe_file.load(example, options), None))
    assert isinstance(found, RadianceWorkload)
    return found


def fitted(fit: Fit) -> tuple[RadianceWorkload, Field]:
    """The workload, and its fitted field."""
    torch.set_num_threads(1)
    whole, state = opened(fit), None
    train = whole.recipe.train
    for phase in whole.phases():
        own = whole.at(phase)
        field = own.build(torch.device("cpu"), torch.float32)
        assert isinstance(field, Field)
        if fit.peer and field.colours is not None:
            field.colours.__class__ = PEERS[fit.peer]
        if state is not None:
            field.load_state_dict({**field.state_dict(), **own.carry(state)})
        rate = train.optimizer.learning_rate or 1e-3
        optimizer = torch.optim.Adam(field.parameters(), lr=rate, betas=(0.9, 0.99), fused=True)
        for step in range(phase.start, phase.stop):
            optimizer.param_groups[0]["lr"] = rate * schedules.factor(train.schedule, step, fit.steps)
            loss, weight = own.loss(field, own.batches(step, Shard(0, fit.rays, fit.rays))[0])
            optimizer.zero_grad()
            (loss / weight).backward()
            optimizer.step()
        state = field.state_dict()
    return own, field


def run(fit: Fit) -> Found:
    """Fits, renders the test views and counts."""
    workload, field = fitted(fit)
    scene, options = workload.scene, workload.options
    views, pixels = list(scene.parts["test"]), scene.lens.width * scene.lens.height
    decibels, met, coloured, spikes = [], 0, 0, torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for view in views:
            rays = scene.rays(torch.full((pixels,), view), torch.arange(pixels))
            made = field(rays)
            error = (made.colours - scene.colours(torch.full((pixels,), view), torch.arange(pixels))).square().mean()
            decibels.append(psnr(float(error)))
            met, coloured = met + int((made.offsets.diff() > 0).sum()), coloured + len(made.points)
            spikes += made.spikes if len(made.spikes) else 0
        shown = workload.render(field, scene.lens, scene.poses[views[0]])
        with counts.Counter(field) as counter:
            field(rays)
    plain, hoisted = (spikingnerf.operations(options, coloured, met, spikes, hoists=one) for one in (False, True))
    neurons = max(1, coloured * options.width * (spikingnerf.REPEATS if fit.alignment == "repeated" else 1))
    return Found(
        statistics.mean(decibels),
        plain.joules() / len(views),
        hoisted.joules() / len(views),
        counter.total.joules(),
        counter.total.joules("dram"),
        (float(spikes[0]) / neurons, float(spikes[1]) / neurons),
        plain.acs / len(views),
        np.concatenate([scene.images[views[0]].numpy(), shown.image.numpy()], 1),
    )


def kept(keep: str, fit: Fit) -> Path:
    """Where what `run` found of a fit is kept."""
    return Path(keep) / f"{hashlib.sha1(repr(fit).encode()).hexdigest()}.pickle"


def run_once(keep: str, fit: Fit) -> Found:
    """`run`, or what is kept of it."""
    path = kept(keep, fit)
    if keep and path.exists():
        found: Found = pickle.loads(path.read_bytes())
        return found
    found = run(fit)
    print(f"  {fit}: {found.psnr:.2f} dB", flush=True)
    if keep:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(pickle.dumps(found))
        fresh.replace(path)
    return found


def together(fits: Sequence[Fit], sizes: Sizes) -> dict[Fit, Found]:
    """All of them, two at a time, by seed, the longest first; or what is kept of them."""

    def order_of(one: Fit) -> tuple[int, int]:
        return one.seed, -one.steps * one.width * (4 if one.alignment == "repeated" or one.peer else 1)

    keep = sizes.keep
    there = [one for one in fits if keep and kept(keep, one).exists()]
    missing = [] if sizes.kept else sorted(set(fits) - set(there), key=order_of)
    found = {one: run_once(keep, one) for one in there}
    if missing:
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            found |= dict(zip(missing, pool.map(run_once, [keep] * len(missing), missing), strict=True))
    for fit, one in found.items():
        print(f"  {fit}: {one}")
    return found


def paired(found: Mapping[Fit, Found], ours: Sequence[Fit], others: Sequence[Fit]) -> list[tuple[Found, Found]]:
    """Seed by seed, of those that there are."""
    return [(found[one], found[two]) for one, two in zip(ours, others, strict=True) if one in found and two in found]


def row(case: str, peer: str, unit: str, pairs: Sequence[tuple[float, float]], better: float = 1.0) -> Row:
    """Medians of (ours, peer) over seeds, and their ratio with its range; `better` -1: less is better."""
    ratios = [(max(ours, 1e-15) / max(theirs, 1e-15)) ** better for ours, theirs in pairs]
    low, high = interval(ratios)
    ours, theirs = (statistics.median(one) for one in zip(*pairs, strict=True))
    return Row(case, peer, theirs, ours, statistics.median(ratios), unit, f"{low:.3f}-{high:.3f} (n={len(ratios)})")


def decibels(case: str, peer: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """Medians of PSNR of (ours, peer) over seeds, and how far they are apart."""
    apart = [ours - theirs for ours, theirs in pairs]
    ours, theirs = (statistics.median(one) for one in zip(*pairs, strict=True))
    spread = f"{statistics.median(apart):+.2f} dB, {min(apart):+.2f} to {max(apart):+.2f} (n={len(apart)})"
    return Row(case, peer, theirs, ours, ours / theirs, "dB", spread)


# --- the cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much is fitted."""

    scenes: tuple[str, ...]
    seeds: int
    steps: int
    resolution: int
    widths: tuple[int, ...]
    note: str
    picture: str = ""
    rays: int = RAYS
    """Of a step of `quality`."""
    keep: str = ""
    kept: bool = False
    """Nothing is fitted: rows are of what is kept."""


def quality(sizes: Sizes) -> list[Row]:
    """PSNR at equal and at twice the steps, and energy, spiking beside plain."""
    base = [
        Fit("voxels", scene, seed, sizes.steps, width, sizes.resolution, rays=sizes.rays)
        for scene in sizes.scenes
        for width in (sizes.widths if scene == sizes.scenes[0] else sizes.widths[:1])
        for seed in range(1, (sizes.seeds if width == sizes.widths[0] else 1) + 1)
    ]
    longer = [replace(one, kind="spikingnerf", steps=2 * one.steps) for one in base]
    equal = [replace(one, kind="spikingnerf") for one in base]
    found, rows = together([*base, *longer, *equal], sizes), []
    if sizes.picture:
        firsts = [place for place, one in enumerate(base) if one.seed == 1 and one.width == sizes.widths[0]]
        views = [[found[each[place]].view for each in (base, equal, longer)] for place in firsts]
        size = views[0][0].shape[1] // 2
        lines = [np.concatenate([plain, *(one[:, size:] for one in spiking)], 1) for plain, *spiking in views]
        Path(sizes.picture).write_bytes(artifacts.encode(np.concatenate(lines).repeat(2, 0).repeat(2, 1)))
    for scene in sizes.scenes:
        for width in sorted({one.width for one in base if one.scene == scene}, reverse=True):
            own = [one for one in base if (one.scene, one.width) == (scene, width)]
            case = f"{name_of(scene)}, hidden {width}, {sizes.steps} steps of {sizes.rays:,} rays{sizes.note}"
            plain = [found[one] for one in own]
            same, twice = ([found[other] for one, other in zip(base, others, strict=True) if one in own]
                           for others in (equal, longer))  # fmt: skip

            def pairs(field: str, spiking: Sequence[Found], plain: Sequence[Found] = plain) -> list[Any]:
                return [(getattr(s, field), getattr(p, field)) for s, p in zip(spiking, plain, strict=True)]

            rows += [
                decibels(f"{case}: PSNR", "plain network", pairs("psnr", same)),
                decibels(f"{case}: PSNR of twice the steps", "plain network", pairs("psnr", twice)),
                *(
                    row(f"{case}: {what}{after}", f"plain network{likewise}", "J per image", pairs(field, spiking), -1)
                    for after, spiking in (("", same), (" after twice the steps", twice))
                    for what, likewise, field in (
                        ("colour network", "", "joules"),
                        ("directions once a ray", ", likewise", "hoisted"),
                    )
                ),
                *spikes_alone(case, width, list(zip(same, plain, strict=True))),
                row(f"{case}: all that is computed", "plain field", "J per image", pairs("counted", same), -1),
            ]
            rates = [statistics.median(one.rates[layer] for one in twice) for layer in (0, 1)]
            rows.append(Row(f"{case}: spikes of a neuron and sample", "second layer", rates[1], rates[0],
                            rates[0] / max(1e-9, rates[1]), "rate", f"n={len(twice)}"))  # fmt: skip
    return rows


def dram(sizes: Sizes) -> list[Row]:
    """Joules of an image with the traffic of DRAM, of all that is computed: fields of `quality` after as many steps."""
    rows, width = [], sizes.widths[0]
    for scene in sizes.scenes:
        seeds = range(1, sizes.seeds + 1)
        plain = [Fit("voxels", scene, one, sizes.steps, width, sizes.resolution, rays=sizes.rays) for one in seeds]
        spiking = [replace(one, kind="spikingnerf") for one in plain]
        pairs = paired(together([*plain, *spiking], sizes), spiking, plain)
        case = f"{name_of(scene)}, hidden {width}, {sizes.steps} steps of {sizes.rays:,} rays{sizes.note}"
        joules = [(own.moved, other.moved) for own, other in pairs]
        rows.append(row(f"{case}: all that is computed, and DRAM", "plain field", "J per image", joules, -1))
    return rows


def spikes_alone(case: str, width: int, pairs: Sequence[tuple[Found, Found]]) -> list[Row]:
    """What the additions of (spiking, plain) take by themselves, and how many samples have a colour, which follows from
    the joules of their multiplications."""
    joules, samples, columns = [], [], 12.0 + VIEW
    for spiking, plain in pairs:
        added = counts.Counts(acs=spiking.sops).joules()
        joules.append((added, plain.joules))
        of_one = [counts.Counts(macs=inputs * width).joules() for inputs in (columns, columns + width + 3)]
        samples.append(((spiking.joules - added) / of_one[0], plain.joules / of_one[1]))
    return [
        row(f"{case}: additions for spikes alone", "plain network, all", "J per image", joules, -1),
        row(f"{case}: samples with a colour", "plain network", "per image", samples, -1),
    ]


def penalty(sizes: Sizes) -> list[Row]:
    """Fields of the first scene whose spikes are penalized, beside plain ones after as many steps, and beside those
    whose spikes are not."""
    scene, width = sizes.scenes[0], sizes.widths[0]
    plain = [
        Fit("voxels", scene, seed, sizes.steps, width, sizes.resolution, rays=sizes.rays)
        for seed in range(1, sizes.seeds + 1)
    ]
    free = [replace(one, kind="spikingnerf") for one in plain]
    bound = [replace(one, penalty=PENALTY) for one in free]
    found, rows = together([*plain, *free, *bound], sizes), []
    case = f"{name_of(scene)}, hidden {width}, {sizes.steps} steps of {sizes.rays:,} rays{sizes.note}"
    case += f", spike penalty {PENALTY:g}"
    for name, others in (("plain network", plain), ("no penalty", free)):
        pairs = paired(found, bound, others)
        rows.append(decibels(f"{case}: PSNR", name, [(own.psnr, other.psnr) for own, other in pairs]))
        for what, key in (("colour network", "joules"), ("directions once a ray", "hoisted")):
            joules = [(getattr(own, key), getattr(other, key)) for own, other in pairs]
            rows.append(row(f"{case}: {what}", name, "J per image", joules, -1))
    for layer, name in enumerate(("first", "second")):
        rates = [(own.rates[layer], other.rates[layer]) for own, other in pairs]
        rows.append(row(f"{case}: spikes of a neuron and sample, {name} layer", "no penalty", "rate", rates, -1))
    return rows


def name_of(scene: str) -> str:
    """A scene as rows call it."""
    return scene if ":" in scene else Path(scene).name


def alignments(sizes: Sizes) -> list[Row]:
    """TCP beside TP, repeated steps and the flip: PSNR, and operations on spikes."""
    others = {"tp": {"alignment": "tp"}, "repeated": {"alignment": "repeated"}, "tcp from far to near": {"flip": True}}
    return beside(sizes, others, ", tcp")


def beside(sizes: Sizes, others: Mapping[str, Mapping[str, Any]], what: str = "") -> list[Row]:
    """PSNR and operations on spikes of the usual spiking field, beside that of other fields of `Fit`."""
    scene, width = sizes.scenes[0], 64
    base = [Fit("spikingnerf", scene, seed, sizes.steps, width, sizes.resolution) for seed in range(1, sizes.seeds + 1)]
    fits = {name: [replace(one, **changes) for one in base] for name, changes in others.items()}
    found = together([*base, *(one for each in fits.values() for one in each)], sizes)
    case, rows = f"{name_of(scene)}, hidden {width}, {sizes.steps} steps of {RAYS} rays{sizes.note}{what}", []
    for name, each in fits.items():
        pairs = paired(found, base, each)
        if not pairs:
            continue
        rows.append(decibels(f"{case}: PSNR", name, [(own.psnr, other.psnr) for own, other in pairs]))
        sops = [(own.sops, other.sops) for own, other in pairs]
        rows.append(row(f"{case}: operations on spikes", name, "per image", sops, -1))
    return rows


def peers(sizes: Sizes) -> list[Row]:
    """PSNR after training, and operations on spikes, beside other libraries' neurons on the same field."""
    return beside(sizes, {name: {"peer": name} for name in there()})


def heads(sizes: Sizes) -> list[Row]:
    """The colour network alone, on the samples of one batch of each scene."""
    torch.set_num_threads(1)
    fits = [Fit("spikingnerf", one, 1, sizes.steps // 2, 64, sizes.resolution) for one in sizes.scenes]
    return [one for fit in fits for one in heads_of(fit, sizes)]


def heads_of(fit: Fit, sizes: Sizes) -> list[Row]:
    """The same, of the field that is fitted so."""
    workload, field = fitted(fit)
    ours = field.colours
    assert isinstance(ours, SpikingColours)
    features, views, found = survivors(workload, field, RAYS)
    lengths = found.offsets.diff()
    case = f"{name_of(fit.scene)}, hidden 64, {len(features):,} samples on {int((lengths > 0).sum())} rays{sizes.note}"
    rows, own = [], head_step(ours, features, views, found)
    print(f"  longest ray {int(lengths.max())}, mean {float(lengths[lengths > 0].float().mean()):.1f}")
    padded = PaddedColours(ours.columns, ours.second.weight.shape[0])
    padded.load_state_dict(ours.state_dict())
    contestants: dict[str, SpikingColours] = {"padded rays, a Python loop": padded}
    for name in there():
        contestants[name] = PEERS[name](ours.columns, ours.second.weight.shape[0])
        contestants[name].load_state_dict(ours.state_dict())
    for name, network in contestants.items():
        other = head_step(network, features, views, found)
        pairs = [(timed(own), timed(other)) for _ in range(sizes.seeds * 5)]
        rows.append(compare(f"{case}: forward and backward", name, "s", pairs, higher_is_better=False))
        kept = [(float(kept_by(own)), float(kept_by(other)))]
        rows.append(row(f"{case}: kept for backward", name, "bytes", kept, -1))
        most = [(float(peak_of(own)), float(peak_of(other)))]
        rows.append(row(f"{case}: at most in tensors at a time", name, "bytes", most, -1))
        same = (network(features, views, found)[0] - ours(features, views, found)[0]).detach().abs().max()
        print(f"  {name}: colours differ by {float(same):.2g}")
    return rows + rendering(case, ours, (features, views, found), sizes)


def rendering(case: str, ours: SpikingColours, given: tuple[Tensor, Tensor, RaySamples], sizes: Sizes) -> list[Row]:
    """The last two layers from spikes, beside dense products, without gradients."""
    features, views, found = given
    with torch.no_grad():
        currents = ours.currents(features, views, found)
        fast = lambda: ours._from_spikes(currents, found.offsets)  # noqa: E731
        dense = lambda: ours._layers(currents, found.offsets)  # noqa: E731
        rate = float(lif_scan(currents, found.offsets).mean())
        pairs = [(timed(fast), timed(dense)) for _ in range(sizes.seeds * 10)][3:]
    name = f"dense products at a rate of {rate:.2f}"
    return [compare(f"{case}: rendering by rows of neurons that fire", name, "s", pairs, higher_is_better=False)]


def train(sizes: Sizes) -> list[Row]:
    """`espalier train` of the first scene, whole: seconds until a validation of the plain field has 30 dB, its last
    PSNR, and how long the spiking field takes for as many steps."""
    scene = sizes.scenes[0]
    plain, spiking = (trained(kind, sizes) for kind in ("voxels", "spikingnerf"))
    case, steps = f"{name_of(scene)}, espalier train, 2 cores{sizes.note}", 2 * sizes.steps
    rows = []
    for goal, most in ((25.0, 45.0), (GOAL, 120.0)):
        seconds = next((at for at, decibels in plain if decibels >= goal), float("inf"))
        what = f"{case}: seconds to {goal:g} dB, start included"
        rows.append(Row(what, "goal", most, seconds, most / seconds, "s", "n=1"))
    last, found = plain[-1], spiking[-1]
    what = f"{case}: PSNR of {steps} steps in {last[0]:.0f} s"
    rows.append(Row(what, "goal", GOAL, last[1], last[1] / GOAL, "dB", "n=1"))
    what = f"{case}: {steps} steps of the spiking field, {found[1]:.1f} dB"
    return [*rows, Row(what, "plain field", last[0], found[0], last[0] / found[0], "s", "n=1")]


def trained(kind: str, sizes: Sizes) -> list[tuple[float, float]]:
    """`validations` of the example on the first scene."""
    example = Path(__file__).parents[1] / "examples" / "scene.toml"
    changes = [f"data.path={sizes.scenes[0]}", f"train.steps={2 * sizes.steps}", f"model.resolution={sizes.resolution}"]
    changes += [f"model.kind={kind}", "plan.trial=false", "--run", "run"]
    with tempfile.TemporaryDirectory() as place:
        begun = time.time()
        command = [sys.executable, "-m", "espalier", "train", str(example), *changes]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
        return list(validations(Path(place) / "run" / "events.jsonl", begun))


def validations(log: Path, begun: float) -> Iterator[tuple[float, float]]:
    """(seconds since `begun`, PSNR) of each."""
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "validation":
            yield event["time"] - begun, event["psnr"]


# --- a whole step ------------------------------------------------------------------------------------------------


def long(sizes: Sizes) -> list[Row]:
    """PSNR of a plain field that is trained beyond 30 dB, and of a spiking one for twice the steps, seed by seed."""
    fits = [
        Fit("voxels", sizes.scenes[0], seed, 2 * sizes.steps, 64, sizes.resolution, rays=2 * sizes.rays)
        for seed in range(1, sizes.seeds + 1)
    ]
    longer = [replace(one, kind="spikingnerf", steps=2 * one.steps) for one in fits]
    pairs = paired(together([*fits, *longer], sizes), longer, fits)
    case = f"{name_of(sizes.scenes[0])}, hidden 64, {fits[0].steps} steps of {fits[0].rays:,} rays{sizes.note}"
    apart = [(spiking.psnr, plain.psnr) for spiking, plain in pairs]
    return [decibels(f"{case}: PSNR of twice the steps (goal: at most 0.5 dB less)", "plain network", apart)]


def steps(sizes: Sizes) -> list[Row]:
    """A whole training step of the fine stage, spiking beside plain, in turn on the same rays: its seconds on one
    thread, and the bytes of the tensors that it has at most."""
    torch.set_num_threads(1)
    scene, rays = sizes.scenes[0], 2 * sizes.rays
    made = []
    for kind in ("spikingnerf", "voxels"):
        fit = Fit(kind, scene, 1, sizes.steps // 2, 64, sizes.resolution, rays=rays)
        made.append(whole_step(*fitted(fit), rays))
    for one in made:
        one()
    pairs = [(timed(made[0]), timed(made[1])) for _ in range(sizes.seeds * 5)]
    case = f"{name_of(scene)}, hidden 64, a training step of {rays:,} rays after {sizes.steps // 2}{sizes.note}"
    most = [(float(peak_of(made[0])), float(peak_of(made[1])))]
    return [
        compare(f"{case} (goal: at most 1.5 times)", "plain network", "s", pairs, higher_is_better=False),
        row(f"{case}: at most in tensors at a time", "plain network", "bytes", most, -1),
    ]


def gradients(sizes: Sizes) -> list[Row]:
    """Bytes that a rank of two sends of the gradients of a step in the fine stage: nonzero values with their places
    (codec sparse), beside all values and int8. By content, not by time."""
    torch.set_num_threads(1)
    rows = []
    for resolution in (sizes.resolution, sizes.resolution * 3 // 2, sizes.resolution * 5 // 2):
        for rays in (1024, 4096):
            fit = Fit("voxels", sizes.scenes[-1], 1, 8, 64, resolution, rays=rays)
            workload, field = fitted(fit)
            sent = {name: sent_of(workload, field, rays, name) for name in ("sparse", "exact", "int8")}
            case = f"{name_of(fit.scene)}, gradients of {resolution}³ cells, {rays:,} rays on 2 ranks{sizes.note}"
            for peer in ("exact", "int8"):
                rows.append(row(f"{case}: sent by codec sparse", peer, "bytes", [(sent["sparse"], sent[peer])], -1))
    return rows


def sent_of(workload: RadianceWorkload, field: Field, rays: int, name: str) -> float:
    """Bytes of the all-reduce that the first of two ranks sends, grid by grid: half of its own, and half of the sum."""
    own: list[dict[str, Tensor]] = []
    for rank in (0, 1):
        field.zero_grad()
        loss, _ = workload.loss(field, workload.batches(9, Shard(rank * rays // 2, (rank + 1) * rays // 2, rays))[0])
        loss.backward()
        own.append({n: p.grad.flatten().clone() for n, p in field.named_parameters() if p.grad is not None})
    sent = 0.0
    for key, mine in own[0].items():
        half = len(mine) // 2
        for part in (mine[half:], mine[:half] + own[1][key][:half]):
            for piece in part.split(compressed_collectives.PIECE):
                wire = codecs.codec(name).encode(piece)
                assert wire is not None
                sent += wire.nbytes
    return sent


CASES = {
    "train": train,
    "heads": heads,
    "steps": steps,
    "gradients": gradients,
    "long": long,
    "alignments": alignments,
    "peers": peers,
    "quality": quality,
    "dram": dram,
    "penalty": penalty,
}


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments(
        __doc__ or "",
        only={"default": ",".join(CASES), "help": "cases, with commas"},
        picture={"default": "", "help": "PNG that `quality` writes"},
        keep={"default": "", "help": "folder of what was fitted"},
        kept={"action": "store_true", "help": "fit nothing more"},
        scene={"default": "spheres:", "help": "a folder in Blender's layout, or a scene that is rendered here"},
    )
    scenes, keep = (asked.scene, "knot:"), (asked.keep, asked.kept)
    sizes = Sizes(scenes, asked.pairs or 3, 400, 64, (128, 64), "", asked.picture, 2 * RAYS, *keep)
    if asked.quick:
        sizes = Sizes(
            ("spheres:views=8,size=32", "knot:views=8,size=32"),
            asked.pairs or 1,
            60,
            24,
            (32,),
            ", quick",
            asked.picture,
            keep=asked.keep,
        )
    begun, rows = time.monotonic(), []
    for name in asked.only.split(","):
        rows += CASES[name](sizes)
        print(f"{name}: {time.monotonic() - begun:.0f} s")
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
