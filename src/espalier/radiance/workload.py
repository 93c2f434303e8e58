"""The Workload Protocol's answer for scenes: `model.kind = "voxels"` or `"spikingnerf"`, in two phases.

A sample is a ray, drawn from all pixels of the training views. The first phase trains a coarse density with colours; at
its end cells where nothing is are left out, and the second trains a fine density, features and a colour network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from espalier.comm import sparse_blocks
from espalier.kernels import counts
from espalier.parallel.workload import Averages, Phase, Plain, Shard, SummedLoss, Sums
from espalier.radiance import energy, spikingnerf
from espalier.radiance.rays import Lens, Rays
from espalier.radiance.scenes import Scene
from espalier.radiance.spikingnerf import SpikingColours
from espalier.radiance.volume_rendering import SceneBox
from espalier.radiance.voxels import ColourNetwork, Field, Rendered, ray_losses, refined, sample_losses
from espalier.recipe import Recipe, SpikingNerf, Voxels
from espalier.recipe.cost import Product, Work
from espalier.recipe.errors import UserError
from espalier.recipe.sections import VALIDATE_TOKENS
from espalier.store.artifacts import Artifact, Image, Table

EMPTY = 1e-4
"""Opacity that the coarse stage begins with."""
THIN = 1e-2
"""Opacity that the fine stage has where the coarse one found nothing."""
LOSSES = {"coarse": (0.01, 0.1), "fine": (0.001, 0.01)}
"""Weights of the entropy of what passes, and of the colours of single samples, by stage (DVGO's)."""
TOUCHED = 4.6
"""Cells of a grid that a ray's samples touch, by the cells of a side: a cube of two cells, which is what a lookup
reaches over, has a mean projection of 6, and a ray through a box's middle is 0.77 sides long. Measured before masks
know what is empty: 4.1 to 4.7, at 32 to 160 cells and 512 to 4,096 rays."""
SAMPLES, COLOURED = 1.75, 0.6
"""Samples of a ray, by the cells of a side, in the box; and the share of them that has a colour in the fine stage once
masks know what is empty (measured: 1.7 to 1.8, and 0.59)."""
CHUNK = 8192
"""Rays rendered at once."""
SHOWN = 2
"""Held-out views shown beside the truth."""


class RayBatch(NamedTuple):
    """Rays with their true colours [rays, 3]."""

    rays: Rays
    colours: Tensor


class RadianceWorkload(Plain):
    """One field of one scene. `train.batch_tokens` counts rays. Has state: what the latest steps met on their rays.

    `phase`: of the workload of one phase, which it is.
    """

    def __init__(self, recipe: Recipe, scene: Scene, phase: Phase | None = None) -> None:
        assert isinstance(recipe.model, Voxels)
        self.recipe = recipe
        self.scene = scene
        self.options = recipe.model
        self._phase = phase
        self.global_batch = recipe.train.batch_tokens or 2048
        self.nominal_weight = float(self.global_batch)
        self._dtype = torch.float32
        self._met = (0, 0, (0, 0))
        self.meters: Mapping[str, Callable[[], Any]] = {"scene": self._seen}
        self._train, self._held = (torch.tensor(scene.parts[name], dtype=torch.int64) for name in ("train", "val"))

    # --- phases and the model ------------------------------------------------------------------------------------

    def phases(self) -> Sequence[Phase]:
        """Coarse, then fine."""
        if self._phase is not None:
            return [self._phase]
        steps = self.recipe.train.steps or 2
        boundary = min(max(1, round(self.options.coarse * steps)), steps - 1)
        return [Phase(0, boundary, "coarse"), Phase(boundary, steps, "fine")]

    def at(self, phase: Phase) -> RadianceWorkload:
        """With the field of that phase."""
        return self if self._phase is not None else RadianceWorkload(self.recipe, self.scene, phase)

    @property
    def stage(self) -> str:
        """The phase's name; of the whole run, its last."""
        return "fine" if self._phase is None else self._phase.name

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The field of the phase, seeded."""
        self._dtype = dtype
        return self._field(self.stage).to(device=device, dtype=dtype)

    def _field(self, stage: str) -> Field:
        options = self.options
        box = SceneBox(self.scene.box[0], self.scene.box[1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.train.seed)
            if stage == "coarse":
                field = Field(box, max(8, options.resolution // 2), 3, EMPTY, None)
            else:
                field = Field(box, options.resolution, options.features, THIN, self._network())
        field.background = self.scene.background
        return field

    def _network(self) -> ColourNetwork:
        options = self.options
        if isinstance(options, SpikingNerf):
            return SpikingColours(options.features, options.width, options.alignment, options.flip)
        return ColourNetwork(options.features, options.width)

    def carry(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The fine field's mask, box and density from the coarse field's."""
        if self.stage == "coarse":
            return state
        coarse = self._field("coarse")
        fine = self._field("fine")
        coarse.load_state_dict(dict(state))
        return refined(coarse.float(), fine)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The field is one."""
        return [model]

    def embeddings(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """The matrices of the first layer and of the last: what Muon leaves to AdamW. Grids are no matrices."""
        network = model.colours if isinstance(model, Field) else None
        layers = [network.first, network.last] if isinstance(network, ColourNetwork) else []
        return [parameter for layer in layers for parameter in layer.parameters()]

    def recompute(self, model: nn.Module, mode: str) -> None:
        """Only `none`."""
        if mode != "none":
            raise UserError(f"train.recompute = {mode!r} is not possible for a scene.", do='train.recompute = "none"')

    # --- the data ------------------------------------------------------------------------------------------------

    def batches(self, step: int, shard: Shard) -> list[RayBatch]:
        """Rays of the step, drawn from all pixels of the training views."""
        drawn = torch.Generator().manual_seed(self.recipe.train.seed * 1_000_003 + step)
        pixels = self._pixels
        chosen = torch.randint(len(self._train) * pixels, (self.global_batch,), generator=drawn)
        return [self._batch(self._train, chosen[start:stop]) for start, stop in shard.cuts if stop > start]

    @property
    def _pixels(self) -> int:
        return self.scene.lens.width * self.scene.lens.height

    def _batch(self, views: Tensor, chosen: Tensor) -> RayBatch:
        """Rays by number among all pixels of `views`."""
        which = views[chosen // self._pixels]
        pixels = chosen % self._pixels
        return RayBatch(self.scene.rays(which, pixels), self.scene.colours(which, pixels))

    def loss(self, model: nn.Module, batch: RayBatch) -> SummedLoss:
        """Sum over rays of the squared error of colours (a mean over the three), of the entropy of what passes all
        samples, of single samples' colours, and of spikes; and the number of rays."""
        rendered: Rendered = model(batch.rays)
        entropy, single = LOSSES[self.stage]
        true = batch.colours.to(rendered.colours.dtype)
        self._met = (len(true), len(rendered.points), tuple(rendered.spikes.tolist()) or (0, 0))
        whole = (
            ray_losses(rendered.colours, rendered.rest, true, entropy).sum()
            + single * sample_losses(rendered, true).sum()
        )
        if len(rendered.spikes):
            assert isinstance(self.options, SpikingNerf)
            width = self.options.width
            share = spikingnerf.accumulations(width, rendered.spikes) / (width * (width + 3))
            whole = whole + (self.options.spike_penalty * share).to(whole.dtype)
        return whole, torch.tensor(float(len(true)))

    def _seen(self) -> dict[str, float]:
        """Samples that got a colour, and spikes of each layer, of a ray of the latest micro-batch."""
        rays, samples, spikes = self._met
        figures = {"samples": samples / max(1, rays)}
        if self.stage == "fine" and isinstance(self.options, SpikingNerf):
            figures |= {f"spikes_{k}": count / max(1, rays) for k, count in enumerate(spikes, 1)}
        return figures

    def validation_samples(self) -> int:
        """Rays of the held-out views, up to `train.validate_tokens`."""
        return min(len(self._held) * self._pixels, self.recipe.train.validate_tokens or VALIDATE_TOKENS)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, shard: Shard) -> Sums:
        """Squared error; and of rays spikes, and joules of the colour network with all of an image's rays."""
        every = len(self._held) * self._pixels
        samples = self.validation_samples()
        names = ["loss", *(self._figures() if self.stage == "fine" else [])]
        totals = {name: [0.0, 0.0] for name in names}
        for start, stop in shard.cuts:
            chosen = torch.arange(start, stop) * every // max(1, samples)
            batch = self._batch(self._held, chosen)
            device = next(model.parameters()).device
            rays = Rays(*(ray.to(device, self._dtype) for ray in batch.rays))
            made: Rendered = model(rays)
            error = float((made.colours.cpu() - batch.colours).square().mean(1).double().sum())
            sums = {"loss": error, **self._spent(made)}
            for name, value in sums.items():
                totals[name][0] += value
                totals[name][1] += len(chosen)
        return {name: (pair[0], pair[1]) for name, pair in totals.items()}

    def _figures(self) -> list[str]:
        spikes = ["spikes_per_ray"] if isinstance(self.options, SpikingNerf) else []
        return [*spikes, "joules_per_image"]

    def _spent(self, made: Rendered) -> dict[str, float]:
        """Spikes of these rays; joules of as many images as they have pixels for one."""
        if self.stage == "coarse":
            return {}
        met = int((made.offsets.diff() > 0).sum())
        done = spikingnerf.operations(self.options, len(made.points), met, made.spikes)
        figures = {"joules_per_image": done.joules() * self._pixels}
        return figures | ({"spikes_per_ray": float(made.spikes.sum())} if isinstance(self.options, SpikingNerf) else {})

    def summary(self, totals: Averages) -> Averages:
        """With the peak signal-to-noise ratio of all held-out rays, in decibels."""
        others = {name: value for name, value in totals.items() if name != "loss"}
        return {"loss": totals["loss"], "psnr": psnr(totals["loss"]), **others}

    def documents(self, step: int, shard: Shard) -> list[str]:
        """The views are the same in all batches."""
        return [f"the rays of step {step + 1}"]

    # --- pictures ------------------------------------------------------------------------------------------------

    def sample(self, model: nn.Module) -> Sequence[Artifact]:
        """Held-out views as they are rendered, the truth, and depths; and the figures of the test views."""
        test = list(self.scene.parts["test"]) or self._held.tolist()
        if not test or not len(self.scene.images):
            return []
        shown = []
        rows = list[Sequence[str | float]]()
        for view in test[:: max(1, len(test) // SHOWN)][:SHOWN]:
            made = self.render(model, self.scene.lens, self.scene.poses[view])
            truth = self.scene.images[view]
            error = float((made.image.float() - truth.float()).square().mean()) / 255**2
            rows.append([f"view {view}", psnr(error)])
            row = torch.cat([made.image, truth, made.depth[:, :, None].expand(-1, -1, 3)], 1)
            shown.append(Image(row, f"view {view}: rendered, the truth, its depth"))
        artifacts: list[Artifact] = [*shown, Table(("held-out view", "PSNR in dB"), rows)]
        return (
            artifacts if self.stage == "coarse" else [*artifacts, self._energy_table(model, self.scene.poses[test[0]])]
        )

    def _energy_table(self, model: nn.Module, pose: Tensor) -> Table:
        """Of an image, by part: a model, not a measurement."""
        parts = energy.of_view(model, self.rendered(model, self.scene.lens, pose)).parts
        rows = [(name, 1e6 * joules, 1e6 * moved) for name, _, _, _, joules, moved in counts.table(parts)]
        return Table(("energy of an image (modelled)", "µJ, arithmetic", "µJ, with DRAM"), rows)

    @torch.no_grad()
    def render(self, model: nn.Module, lens: Lens, pose: Tensor, chunk: int = CHUNK) -> Picture:
        """One view, `chunk` rays at a time; the size of chunks changes no more than how products are rounded."""
        parts = list(self.rendered(model, lens, pose, chunk))
        colours = torch.cat([part.colours for part in parts]).view(lens.height, lens.width, 3)
        depths = torch.cat([part.depths for part in parts]).view(lens.height, lens.width)
        low = depths.amin()
        high = depths.amax()
        nearness = (high - depths) / (high - low).clamp(min=1e-6)  # 0 at what lies behind everything
        return Picture(byte(colours), byte(nearness))

    def rendered(self, model: nn.Module, lens: Lens, pose: Tensor, chunk: int = CHUNK) -> Iterator[Rendered]:
        """What the field makes of a view's rays, `chunk` at a time, row after row."""
        device = next(model.parameters()).device
        pixels = torch.arange(lens.width * lens.height)
        for chunk_pixels in pixels.split(chunk):
            rays = self.scene.rays_through(lens, pose.expand(len(chunk_pixels), 4, 4), chunk_pixels)
            yield model(Rays(*(ray.to(device, self._dtype) for ray in rays)))

    # --- the rest ------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Of images and cameras."""
        return self.scene.fingerprint()

    def notes(self) -> Sequence[str]:
        """What was found in the scene's folder."""
        return list(self.scene.notes)

    def work(self, micro_batch: Any, recompute: str, precision: str) -> Work:
        """Of rays: samples at half a cell, of which in the fine stage some get a colour."""
        coarse = self.stage == "coarse"
        cells, columns = self._grid()
        crossed = SAMPLES * cells * micro_batch
        coloured = crossed * (1.0 if coarse else COLOURED)
        network = None if coarse else spikingnerf.network_work(self.options, coloured, micro_batch)
        products = (Product(crossed, 8, 1), Product(coloured, 8, columns), *(network.products if network else ()))
        moved = 4.0 * (12 * crossed + 10 * columns * coloured) + (network.moved if network else 0.0)
        saved = 4.0 * (22 * crossed + 3 * coloured) + (network.saved if network else 0.0)
        return Work(products, 0.0, moved, saved, 0.0, 0.0, micro_batch, micro_batch)

    def _grid(self) -> tuple[int, int]:
        """Cells of a side of the stage's grids, and columns of features."""
        options = self.options
        return (
            (max(8, options.resolution // 2), 3) if self.stage == "coarse" else (options.resolution, options.features)
        )

    def sparse_gradients(self) -> float:
        """Bytes of a step's gradients over those that `comm.sparse` makes of them, at least: samples beside each other
        share cells, and what masks leave out has no gradient."""
        cells, columns = self._grid()
        share = -math.expm1(-TOUCHED * self.global_batch / cells**2)
        # Neighbours along z are touched.
        density = sparse_blocks.ratio(share, 2)
        features = sparse_blocks.ratio(share, 2 * columns)
        return (1 + columns) / (1 / density + columns / features)


class Picture(NamedTuple):
    """A rendered view: uint8 [height, width, 3], and nearness in grey [height, width]."""

    image: Tensor
    depth: Tensor


def byte(values: Tensor) -> Tensor:
    """0 to 1 as uint8."""
    return (values.clamp(0, 1) * 255).round().to(torch.uint8).cpu()


def psnr(error: float) -> float:
    """Decibels of a mean squared error of colours from 0 to 1."""
    return -10 * math.log10(max(error, 1e-12))
