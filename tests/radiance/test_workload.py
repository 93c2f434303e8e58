"""Scenes as a workload: ranks, phases, kills and resumes change nothing, views are rendered, and pictures are right."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from programs import MACHINE, forked

from espalier.cli.open_run import SavedRun
from espalier.kernels.base import Operation
from espalier.kernels.ragged import Ragged
from espalier.machine.cluster import loads
from espalier.parallel.workload import Shard
from espalier.plan.decide import decide
from espalier.radiance import energy, rendered_scenes, scenes, spikingnerf
from espalier.radiance import volume_rendering as volume
from espalier.radiance.rays import look_at, rays_of
from espalier.radiance.voxels import LEAST, Field
from espalier.radiance.workload import RadianceWorkload
from espalier.radiance.workload_row import views_of
from espalier.recipe import SpikingNerf, recipe_file
from espalier.recipe.errors import UserError
from espalier.track import events
from espalier.track.run_tables import RunTables
from espalier.train import request_from_recipe, workload_registry

ROOT = Path(__file__).parents[2]
SMALL = [
    *("data.path=knot:views=6,size=16", "model.resolution=16", "model.width=8", "train.batch_tokens=128"),
    *("train.steps=12", "train.validate_every=6", "train.validate_tokens=256", "checkpoint.every=3"),
    *("plan.cluster=machine.toml", "plan.trial=false"),
]
BOUNDARY = 3
"""The step after which the fine stage begins."""


def train(home: Path, *changes: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    torch.set_num_threads(1)
    done = forked(home, "train", str(ROOT / "examples" / "scene.toml"), *SMALL, *changes)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def steps_of(home: Path, name: str, *kinds: str) -> list[dict[str, Any]]:
    return [one for one in events.read(home / "runs" / name / "events.jsonl") if one["event"] in kinds]


def state_of(home: Path, name: str) -> dict[str, torch.Tensor]:
    return dict(SavedRun.find(home / "runs" / name).trained().model.state_dict())


def opened(*changes: str, steps: int = 12) -> RadianceWorkload:
    recipe = recipe_file.load(ROOT / "examples" / "scene.toml", [*SMALL, *changes, f"train.steps={steps}"])
    found = workload_registry.open_workload(workload_registry.settle(recipe, ROOT))
    assert isinstance(found, RadianceWorkload)
    return found


def picture(file: Path) -> Image.Image:
    with Image.open(file) as opened_:
        return opened_.copy()


def pinned(ranks: int) -> list[str]:
    shards = [f"plan.pin.shard.{what}={ranks}" for what in ("params", "grads", "optimizer")]
    return [f"plan.pin.ranks={ranks}", *([*shards, "comm.codec=sparse"] if ranks > 1 else [])]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One spiking run on one rank, one on two that share grids, gradients and states and exchange sparse gradients,
    undisturbed."""
    found = tmp_path_factory.mktemp("scenes")
    (found / "machine.toml").write_text(MACHINE)
    for ranks in (1, 2):
        train(found, "model.kind=spikingnerf", *pinned(ranks), f"name=on{ranks}")
    return found


def test_two_ranks_train_as_one_does(home: Path) -> None:
    one, two = ([e["loss"] for e in steps_of(home, f"on{n}", "step")] for n in (1, 2))
    assert len(one) == 12
    assert one == pytest.approx(two, rel=1e-4)
    left, right = state_of(home, "on1"), state_of(home, "on2")
    assert torch.equal(left["mask"], right["mask"])
    assert left.keys() == right.keys() > {"density.values", "features.values", "colours.first.weight"}
    for name in left:
        assert torch.allclose(left[name], right[name], atol=1e-6), name


def test_the_run_has_two_phases_with_a_plan_each_and_says_what_spikes_cost(home: Path) -> None:
    found = steps_of(home, "on1", "phase", "plan")
    assert [(one["event"], one.get("name"), one.get("step")) for one in found] == [
        *(("phase", "coarse", 0), ("plan", None, None)),
        *(("phase", "fine", BOUNDARY), ("plan", None, None)),
    ]
    first, *_, last = steps_of(home, "on1", "validation")
    assert last["psnr"] == pytest.approx(-10 * np.log10(last["loss"]), abs=1e-6)
    assert last["spikes_per_ray"] >= 0
    assert last["joules_per_image"] > 0
    report = (home / "runs" / "on1" / "report.html").read_text()
    charts = [json.loads(html.unescape(data)) for data in re.findall(r'data-chart="([^"]*)"', report)]
    (curve,) = [chart["series"][0] for chart in charts if chart["title"] == "Psnr"]
    assert [curve["x"][0], curve["x"][-1], curve["y"][0], curve["y"][-1]] == pytest.approx(
        [first["step"], last["step"], first["psnr"], last["psnr"]], rel=1e-4
    )
    assert first["step"] < last["step"]
    assert "joules per image" in report
    assert "in 2 attempts" not in report
    assert RunTables.read(home / "runs" / "on1").account.failures == 0
    assert re.search(r"view \d+: rendered, the truth, its depth", report)
    pictures = [
        Image.open(io.BytesIO(base64.b64decode(one))) for one in re.findall(r"data:image/png;base64,([^\"]+)", report)
    ]
    shown = [np.asarray(one.convert("RGB")) for one in pictures if one.size == (3 * 16, 16)]
    assert len(shown) >= 2
    depths = [one[:, 32:].astype(int) for one in shown]
    assert all((one == one[:, :, :1]).all() for one in depths), "in grey"
    assert max(one.std() for one in depths) > 4, "and of different nearness"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", ["voxels", "spikingnerf"])
def test_rays_without_a_survivor_have_the_colour_of_the_background(kind: str, plain: bool, monkeypatch: Any) -> None:
    """In the plain forms too, which other devices than processors run."""
    if plain:
        monkeypatch.setattr(Operation, "pick", lambda self, *_, **more: self.reference)
    workload = opened(f"model.kind={kind}", "model.resolution=24")
    field, batch = workload.build(torch.device("cpu"), torch.float32), workload.batches(0, Shard(0, 8, 8))[0]
    assert isinstance(field, Field)
    field.mask.zero_()
    found = field(batch.rays)
    assert torch.equal(found.colours, torch.tensor(field.background).expand(8, 3))
    found.colours.sum().backward()
    assert not any(one.grad is not None and one.grad.any() for one in field.parameters())


@pytest.mark.parametrize(("kind", "steps"), [("voxels", 1), ("tcp", 1), ("tp", 1), ("repeated", 4)])
def test_what_a_colour_network_keeps_and_does_is_near_what_is_planned(kind: str, steps: int) -> None:
    """Bytes of a pass, each piece of memory once; repeated steps are planned, and take, four times as long."""
    alignment = [] if kind == "voxels" else [f"model.alignment={kind}"]
    made = "voxels" if kind == "voxels" else "spikingnerf"
    workload = opened(f"model.kind={made}", *alignment, "model.width=64", "model.resolution=24")
    field, batch = workload.build(torch.device("cpu"), torch.float32), workload.batches(0, Shard(0, 128, 128))[0]
    given: list[Any] = []
    assert isinstance(field, Field)
    assert field.colours is not None
    hook = field.colours.register_forward_pre_hook(lambda module, taken: given.append(taken))
    field(batch.rays)
    hook.remove()
    features, views, found = given[0]
    kept, own = dict[int, int](), {one.data_ptr() for one in field.parameters()}

    def keep(one: torch.Tensor) -> torch.Tensor:
        if one.data_ptr() not in own:
            kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        field.colours(features.detach().requires_grad_(True), views, found)
    planned = spikingnerf.network_work(workload.options, len(features), len(views))
    assert planned.saved == pytest.approx(sum(kept.values()), rel=0.15)
    once = spikingnerf.network_work(SpikingNerf(width=64), len(features), len(views))
    assert planned.moved == pytest.approx(once.moved * steps) or kind == "voxels"
    assert planned.model_flops > 0.85 * steps * once.model_flops
    whole, samples = workload.work(128, "none", "fp32"), len(features)
    assert 0.3 < whole.saved / (planned.saved + 88 * samples) < 1.1, "masks leave out what no coarse stage has seen yet"


def test_the_plan_of_a_field_of_repeated_steps_has_more_seconds_and_bytes_than_of_one_step(home: Path) -> None:
    machine = loads(MACHINE)
    found = []
    for changes in (["model.kind=voxels"], ["model.kind=spikingnerf"],
                    ["model.kind=spikingnerf", "model.alignment=repeated"]):  # fmt: skip
        workload = opened(*changes, "model.width=64", "train.batch_tokens=2048", "plan.pin.ranks=1")
        taken = decide(request_from_recipe.of_recipe(workload.recipe, lambda own=workload: own), machine).taken  # type: ignore[misc]
        assert taken.predicted is not None
        found.append((taken.predicted.step_seconds, taken.predicted.memory_bytes["activations"]))
    plain, once, repeated = found
    assert 1 < once[0] / plain[0] < 1.3, "measured: 1.1 times"
    assert 1.5 < repeated[0] / once[0] < 4, "all but the first product is done four times"
    assert plain[1] < once[1] < repeated[1] / 2


def test_the_energy_of_an_image_is_told_by_part_and_for_the_colour_network(home: Path) -> None:
    done = forked(home, "explain", "runs/on1", "--energy", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = {one["part"]: one for one in found["parts"]}
    assert {"grid of densities", "colours: first layer, neurons, spikes"} <= set(parts)
    (table,) = found["tables"]
    rows = {(one["colour network"], one["directions"]): one for one in table["rows"]}
    assert set(rows) == {(kind, how) for kind in ("spiking", "plain") for how in ("once a ray", "for each sample")}
    assert rows["plain", "once a ray"]["accumulations"] == "0"
    assert [one[0] for one in found["constants"]][:2] == ["mac", "ac"]
    shown = forked(home, "explain", "runs/on1", "--energy").stdout
    assert "ISSCC 2014" in shown
    workload, model = (getattr(SavedRun.find(home / "runs" / "on1").trained(), name) for name in ("workload", "model"))
    made = energy.of_view(model, workload.rendered(model, workload.scene.lens, workload.scene.poses[0]))
    by_hand = spikingnerf.operations(workload.options, made.samples, made.rays, made.spikes)
    colours = made.parts["colours: first layer, neurons, spikes"]
    assert (colours.macs, colours.acs) == (by_hand.macs, by_hand.acs)
    assert "energy of an image" in (home / "runs" / "on1" / "report.html").read_text()


def test_a_killed_and_a_stopped_run_end_as_the_undisturbed_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank dies in the first step after the boundary of the phases, and another one later."""
    loss, began = RadianceWorkload.loss, os.getpid()

    def struck(self: RadianceWorkload, model: torch.nn.Module, batch: Any) -> Any:
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        mark = home / f"struck{self.stage}{self.__dict__['calls']}"
        due = {("coarse", BOUNDARY), ("fine", 1), ("fine", 5)}
        if os.getpid() != began and (self.stage, self.__dict__["calls"]) in due and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1)
        return loss(self, model, batch)

    monkeypatch.setattr(RadianceWorkload, "loss", struck)
    train(home, "model.kind=spikingnerf", *pinned(2), "name=killed")
    assert len(list(home.glob("struck*"))) == 3
    found, expected = state_of(home, "killed"), state_of(home, "on2")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_predict_renders_test_views_and_cameras_of_a_file(home: Path) -> None:
    assert forked(home, "predict", "runs/on1", "0").returncode == 0
    assert picture(home / "view-0.png").size == (16, 16)
    pose = rendered_scenes.round_poses(3, 3.2)[1]
    table = {"w": 20, "h": 12, "frames": [{"transform_matrix": pose.tolist()}] * 2}
    (home / "cameras.json").write_text(json.dumps(table))
    done = forked(home, "predict", "runs/on1", "cameras.json", "--json")
    assert json.loads(done.stdout)["images"] == ["cameras-0.png", "cameras-1.png"]
    assert picture(home / "cameras-1.png").size == (20, 12)
    assert forked(home, "predict", "runs/on1", "--turntable", "round.gif").returncode == 0
    with Image.open(home / "round.gif") as turning:
        assert turning.n_frames == 36  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99"], "no test view 99"),
        (["nowhere.json"], "nowhere.json cannot be read: it is not there"),
        (["bad.json"], "singular pose"),
        (["0", "--turntable", "x.gif"], "takes no input"),
        (["--turntable", "x.png"], "no GIF"),
    ],
)
def test_views_that_cannot_be_rendered_are_named(home: Path, arguments: list[str], message: str) -> None:
    (home / "bad.json").write_text(json.dumps({"transform_matrix": [[0.0] * 4] * 4}))
    done = forked(home, "predict", "runs/on1", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.coarse=1.0", "model.coarse"),
        ("model.resolution=4", "model.resolution = 4"),
        ("train.recompute=block", "recompute"),
        ("train.precision=bf16", "precision"),
        ("model.alignment=tp", "alignment"),
        ("model.spike_penalty=2", "spike_penalty"),
        ("train.steps=1", "two stages"),
    ],
)
def test_options_that_cannot_be_are_refused(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(change) if "steps" not in change else opened(steps=1)


def test_batches_are_a_function_of_step_and_shard_alone() -> None:
    workload = opened()
    whole = workload.batches(5, Shard(0, 128, 128))[0]
    parts = [one for start, stop in ((0, 50), (50, 128)) for one in workload.batches(5, Shard(start, stop, 32))]
    assert torch.equal(torch.cat([one.colours for one in parts]), whole.colours)
    assert torch.equal(torch.cat([one.rays.directions for one in parts]), whole.rays.directions)
    assert not torch.equal(workload.batches(6, Shard(0, 128, 128))[0].colours, whole.colours)


def capture(folder: Path) -> list[np.ndarray]:
    """LLFF's layout: the knot before a dark wall, from cameras that look the same way; and their poses."""
    (folder / "images").mkdir()
    lens, rows, poses = rendered_scenes.lens_of(rendered_scenes.Made("knot", size=16)), [], []
    for number in range(12):
        eye = np.float32([0.5 * np.cos(number), 0.5 * np.sin(number), 3.2])
        pose = look_at(eye, np.float32([eye[0] / 2, eye[1] / 2, 0]))
        image = rendered_scenes.render_view("knot", lens, pose).numpy().astype(float)
        shown = image[..., :3] * image[..., 3:] / 255 + 30 * (1 - image[..., 3:] / 255)
        Image.fromarray(shown.astype(np.uint8)).save(folder / "images" / f"{number:02}.png")
        axes = np.stack([-pose[:3, 1], pose[:3, 0], pose[:3, 2]], 1)
        rows.append([*np.concatenate([axes, pose[:3, 3:], [[16], [16], [lens.focal]]], 1).ravel(), 2.2, 4.2])
        poses.append(pose)
    np.save(folder / "poses_bounds.npy", np.array(rows))
    return poses


def kept(workload: RadianceWorkload) -> RadianceWorkload:
    """With the scene as a run folder has it."""
    cameras = json.loads(json.dumps(workload.scene.cameras()))
    return RadianceWorkload(workload.recipe, scenes.of_cameras(cameras))


def test_a_camera_in_the_coordinates_of_a_capture_renders_as_the_view_it_took(tmp_path: Path) -> None:
    poses, file = capture(tmp_path), tmp_path / "camera.json"
    workload = kept(opened(f"data.path={tmp_path}"))
    model = workload.build(torch.device("cpu"), torch.float32)
    for one in model.parameters():
        torch.nn.init.normal_(one, std=3.0, generator=torch.Generator().manual_seed(0))
    ((_, lens, own),) = views_of(workload, "0")
    view = workload.render(model, lens, own).image.float()
    assert view.std() > 20
    for height in (16, 8):
        file.write_text(json.dumps({"transform_matrix": poses[0].tolist(), "h": height}))
        ((_, lens, pose),) = views_of(workload, str(file))
        assert torch.allclose(pose, own, atol=1e-5)
        found, rows = workload.render(model, lens, pose).image.float(), slice(8 - height // 2, 8 + height // 2)
        assert (found - view[rows]).abs().mean() < 1


def test_a_forward_facing_capture_is_learned(tmp_path: Path) -> None:
    capture(tmp_path)
    workload, model = fitted("voxels", 120, f"data.path={tmp_path}")
    totals = workload.evaluate(model, Shard(0, 256, 256))
    assert workload.scene.forward
    mean = workload.scene.images.float().view(-1, 3).mean(0) / 255
    blind = float((workload.scene.images.float() / 255 - mean).square().mean())
    assert totals["loss"][0] / totals["loss"][1] < 0.4 * blind


def fitted(kind: str = "voxels", steps: int = 60, *changes: str) -> tuple[RadianceWorkload, Field]:
    """A short training without a trainer."""
    workload, state = opened(f"model.kind={kind}", "train.batch_tokens=512", *changes, steps=steps), None
    for phase in workload.phases():
        own = workload.at(phase)
        model = own.build(torch.device("cpu"), torch.float32)
        if state is not None:
            model.load_state_dict({**model.state_dict(), **own.carry(state)})
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
        for step in range(phase.start, phase.stop):
            loss, weight = own.loss(model, own.batches(step, Shard(0, 512, 512))[0])
            optimizer.zero_grad()
            (loss / weight).backward()
            optimizer.step()
        state = model.state_dict()
    assert isinstance(model, Field)
    return own, model.eval()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["voxels", "spikingnerf"])
def test_the_size_of_chunks_changes_no_pixel(kind: str) -> None:
    """Colours and depths before they are rounded to bytes, to 1e-6: products of few rows may be summed in another order
    than those of many. The same samples have a colour."""
    workload, model = fitted(kind)
    lens, pose = workload.scene.lens, workload.scene.poses[-1]

    def rendered(chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            parts = list(workload.rendered(model, lens, pose, chunk))
        fields = ("colours", "depths", "weights")
        colours, depths, weights = (torch.cat([getattr(part, name) for part in parts]) for name in fields)
        return colours, depths, weights

    whole = rendered(8192)
    for chunk in (1, 7, 100):
        own = rendered(chunk)
        assert len(own[2]) == len(whole[2])
        for mine, all_ in zip(own, whole, strict=True):
            assert torch.allclose(mine, all_, rtol=0, atol=1e-6)
    assert float(whole[0].std()) > 0.016, "there is a picture"


def test_a_penalty_on_spikes_adds_their_share_of_products_and_leaves_fewer() -> None:
    (free, dense), (bound, sparse) = (
        fitted("spikingnerf", 60, f"model.spike_penalty={one}") for one in ("0", "0.0003")
    )
    batch = free.batches(0, Shard(0, 256, 256))[0]
    with torch.no_grad():
        one, two = dense(batch.rays).spikes.tolist()
        apart = float(bound.loss(dense, batch)[0] - free.loss(dense, batch)[0])
        assert apart == pytest.approx(0.0003 * (one * 8 + two * 3) / (8 * 8 + 8 * 3), rel=5e-3)
        assert 0 < float(sparse(batch.rays).spikes.sum()) < 0.8 * (one + two)


def test_a_field_learns_its_scene_and_masks_change_little() -> None:
    """The carried density is that of the coarse field, and samples that are left out have next to no weight."""
    workload, model = fitted(steps=120)
    totals = workload.evaluate(model, Shard(0, 256, 256))
    figures = workload.summary({name: value / weight for name, (value, weight) in totals.items()})
    assert figures["psnr"] > 16
    pixels = torch.arange(256)
    rays = rays_of(workload.scene.lens, workload.scene.poses[-1].expand(256, 4, 4), pixels)
    mask, frame = model.mask.clone(), model.march().frame
    with torch.no_grad():
        found = model(rays)
        model.mask.fill_(True)
        every = volume.sample_rays(rays.origins, rays.directions, model.march())
        alpha = model.alpha(every.points)
        weights, rest = volume.composite(alpha, every.offsets)
        colours, _ = model.colours(model.features(every.points), rays.views, every)  # type: ignore[misc]
    whole = Ragged(weights[:, None] * colours, every.offsets).sums() + rest[:, None] * torch.tensor(model.background)
    occupied = mask[tuple(((every.points - frame[:3]) * frame[3:]).round().long().T)]
    kept = occupied & (alpha > LEAST)
    assert float(weights[occupied & ~kept].max()) <= LEAST
    removed = Ragged(weights * ~kept, every.offsets).sums()
    light = Ragged(kept.float(), every.offsets).sums() - found.offsets.diff()  # samples of a weight up to 1e-4
    assert bool((light >= 0).all())
    assert int(light.sum()) > 0
    changes = (whole - found.colours).abs().amax(1)
    assert bool((changes <= removed + LEAST * light + 1e-5).all())
    assert float(changes.median()) < 1e-3
    assert float(changes.max()) < 0.05
    ones = torch.zeros(256).index_add(
        0, torch.repeat_interleave(torch.arange(256), found.offsets.diff()), found.weights
    )
    most = found.offsets.diff().max() * 1e-4 + 60 * 1e-4
    assert bool(((ones + found.rest - 1).abs() <= most).all())


def test_rays_that_meet_nothing_have_the_background_and_no_gradient() -> None:
    workload = opened()
    model = workload.build(torch.device("cpu"), torch.float32)
    assert isinstance(model, Field)
    model.mask.fill_(False)
    batch = workload.batches(0, Shard(0, 32, 32))[0]
    found = model(batch.rays)
    assert torch.equal(found.colours, torch.ones(32, 3))
    loss, _ = workload.loss(model, batch)
    loss.backward()
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_reaches_thirty_decibels(tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(MACHINE)
    command = [sys.executable, "-m", "espalier", "train", str(ROOT / "examples" / "scene.toml")]
    command += ["plan.cluster=machine.toml", "plan.trial=false", "--run", "run"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=True)
    last = [one for one in events.read(tmp_path / "run" / "events.jsonl") if one["event"] == "validation"][-1]
    assert last["psnr"] > 30
