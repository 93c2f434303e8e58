"""Scenes: what is rendered can be read back from folders, and folders that are none say why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.radiance import rendered_scenes, scenes
from espalier.radiance.rays import Lens, look_at, rays_of, turntable_poses
from espalier.radiance.scenes import Scene
from espalier.recipe.errors import UserError


def load(path: str | Path) -> Scene:
    return scenes.load(str(path), None, lambda done, total: None)


@pytest.fixture(scope="module")
def rendered() -> dict[str, rendered_scenes.Views]:
    return rendered_scenes.render(rendered_scenes.parse("knot:views=8,size=24"))


@pytest.fixture
def folder(rendered: dict[str, rendered_scenes.Views], tmp_path: Path) -> Path:
    """The rendered scene in Blender's layout."""
    for part, (images, poses) in rendered.items():
        frames = []
        for number, (image, pose) in enumerate(zip(images, poses, strict=True)):
            Image.fromarray(image.numpy()).save(tmp_path / f"{part}_{number}.png")
            frames.append({"file_path": f"./{part}_{number}", "transform_matrix": pose.tolist()})
        table = {"camera_angle_x": rendered_scenes.ANGLE, "frames": frames}
        (tmp_path / f"transforms_{part}.json").write_text(json.dumps(table))
    return tmp_path


def changed(folder: Path, **values: object) -> Path:
    """With other values in the second training frame, or in the whole table."""
    file = folder / "transforms_train.json"
    table = json.loads(file.read_text())
    (table["frames"][1] if set(values) & {"transform_matrix", "file_path"} else table).update(values)
    file.write_text(json.dumps(table))
    return folder


def test_a_folder_of_blender_holds_what_was_rendered(folder: Path) -> None:
    found, own = load(folder), load("knot:views=8,size=24")
    assert torch.equal(found.images, own.images)
    assert torch.allclose(found.poses, own.poses, atol=1e-6)
    assert found.parts == own.parts
    assert found.lens == own.lens
    assert torch.allclose(found.box, own.box, atol=1e-5)
    assert scenes.of_cameras(json.loads(json.dumps(found.cameras()))).cameras() == found.cameras()


def test_a_ray_goes_through_its_pixel() -> None:
    lens, pose = Lens.of_angle(30, 20, 0.7), torch.from_numpy(look_at(np.float32([1, 2, 3]), np.zeros(3, np.float32)))
    pixels = torch.arange(600)
    found = rays_of(lens, pose.expand(600, 4, 4), pixels)
    local = (found.origins + 2.5 * found.directions - pose[:3, 3]) @ pose[:3, :3]
    x = lens.center[0] + lens.focal * local[:, 0] / -local[:, 2]
    y = lens.center[1] - lens.focal * local[:, 1] / -local[:, 2]
    assert torch.allclose(x, pixels % 30 + 0.5, atol=1e-3)
    assert torch.allclose(y, pixels // 30 + 0.5, atol=1e-3)


@pytest.mark.parametrize("kind", rendered_scenes.KINDS)
def test_edges_of_rendered_scenes_are_smooth(kind: str) -> None:
    made = rendered_scenes.render(rendered_scenes.parse(f"{kind}:views=3,size=40"))["train"]
    alpha = made.images[..., 3]
    assert 0.02 < float(((alpha > 0) & (alpha < 255)).float().mean()) < 0.3
    assert 0.1 < float((alpha == 255).float().mean()) < 0.7


def test_a_turntable_looks_at_the_scene_from_the_cameras_distance(folder: Path) -> None:
    found = load(folder)
    poses = turntable_poses(found.poses.numpy(), 12, forward=False)
    distances = np.linalg.norm(poses[:, :3, 3], axis=1)
    assert distances == pytest.approx(rendered_scenes.RADIUS, rel=0.1)
    assert (poses[:, 1, 1] > 0).all(), "upright"


def forward_facing(folder: Path, views: int = 6) -> tuple[Path, np.ndarray]:
    """A capture in LLFF's layout, and the poses of its views [views, 4, 4]."""
    eyes = [np.float32([0.3 * number - 0.7, 0.2 * (number % 2), 0]) for number in range(views)]
    poses = [look_at(eye, np.float32([0, 0, -8])) for eye in eyes]
    return llff(folder, poses), np.stack(poses)


def llff(folder: Path, poses: list[np.ndarray]) -> Path:
    (folder / "images").mkdir()
    rows = []
    for number, pose in enumerate(poses):
        axes = np.stack([-pose[:3, 1], pose[:3, 0], pose[:3, 2]], 1)  # LLFF: down, right, back
        matrix = np.concatenate([axes, pose[:3, 3:], [[20], [30], [25]]], 1)
        rows.append([*matrix.ravel(), 4.0, 10.0])
        Image.fromarray(np.full((20, 30, 3), 40 * number, np.uint8)).save(folder / "images" / f"{number}.png")
    np.save(folder / "poses_bounds.npy", np.array(rows))
    return folder


def test_a_folder_of_llff_has_rays_in_device_coordinates(tmp_path: Path) -> None:
    """Depth -1 is the near plane, 1 is infinity, and a point of the scene is seen at one place of all views."""
    _, poses = forward_facing(tmp_path)
    local = np.stack([(np.float32([0.2, 0.1, -6.0]) - pose[:3, 3]) @ pose[:3, :3] for pose in poses])
    seen = [(15 + 25 * one[0] / -one[2], 10 - 25 * one[1] / -one[2]) for one in local]
    found = load(tmp_path)
    assert found.forward
    assert found.notes
    views = torch.arange(6)
    pixels = torch.tensor([int(y) * 30 + int(x) for x, y in seen])
    rays = found.rays(views, pixels)
    assert torch.allclose(rays.origins[:, 2], torch.tensor(-1.0), atol=1e-5)
    assert float(found.box[0, 2]) == pytest.approx(-1, abs=1e-5)
    assert float(found.box[1, 2]) == pytest.approx(1, abs=1e-5)
    t = (rays.origins[:1, 2] - rays.origins[0, 2] + 1.5 - 1 / 3) / rays.directions[:, 2]  # where z = 1/6 + ...
    across = (rays.origins + t[:, None] * rays.directions)[:, :2]
    assert float(across.std(0).max()) < 0.15, "rays of one point meet"


@pytest.mark.parametrize(
    ("places", "value", "message"),
    [
        ((2, 0), float("nan"), r"poses_bounds.npy, row 2 has a pose that is not finite"),
        ((3, [0, 5, 10]), 0.0, r"row 3 has a singular pose"),
        ((slice(None), 15), float("nan"), "nearest depth of nan"),
        ((0, 15), 0.0, "nearest depth of 0"),
        ((0, 14), 0.0, r"row 0 says nothing of the lens"),
        ((0, 9), float("nan"), r"row 0 says nothing of the lens"),
        ((4, 4), float("inf"), r"poses_bounds.npy, row 4 says nothing of the lens"),
        ((3, 4), 21.0, r"row 3 has 30 × 21 pixels and a focal length of 25.0, and row 0 has 30 × 20 pixels"),
        ((2, 9), 40.0, r"row 2 has 40 × 20 pixels"),
        ((5, 14), 26.0, r"row 5 has .* a focal length of 26.0, and row 0 has .* of 25.0"),
    ],
)
def test_a_bad_row_of_llff_is_named(tmp_path: Path, places: object, value: float, message: str) -> None:
    folder, _ = forward_facing(tmp_path)
    table = np.load(folder / "poses_bounds.npy")
    table[places] = value
    np.save(folder / "poses_bounds.npy", table)
    with pytest.raises(UserError, match=message) as told:
        load(folder)
    assert told.value.do


def test_cameras_of_llff_that_look_away_from_one_another_are_refused(tmp_path: Path) -> None:
    folder, _ = forward_facing(tmp_path, 4)
    table = np.load(folder / "poses_bounds.npy")
    table[:, :15] = table[0, :15]
    turned = table[2:, :15].reshape(2, 3, 5)
    turned[:, :, [1, 2]] *= -1  # right and back: turned round
    np.save(folder / "poses_bounds.npy", table)
    with pytest.raises(UserError, match="do not face one side"):
        load(folder)


def test_cameras_of_llff_round_a_scene_are_refused(tmp_path: Path) -> None:
    """Their directions add up to something, as no real ring is even."""
    turns = np.deg2rad([0, 40, 100, 170, 200, 290])
    eyes = [np.float32([4 * np.sin(turn), 1, 4 * np.cos(turn)]) for turn in turns]
    folder = llff(tmp_path, [look_at(eye, np.zeros(3, np.float32)) for eye in eyes])
    with pytest.raises(UserError, match="do not face one side") as told:
        load(folder)
    assert re.search(r"a corner of view \d is 1\d\d° from their mean direction", told.value.why or "")
    assert "Blender's layout" in told.value.do


def test_images_of_llff_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder, _ = forward_facing(tmp_path)
    image = folder / "images" / "2.png"
    Image.new("RGBA", (30, 20)).save(image)
    with pytest.raises(UserError, match=r"2.png has an alpha channel, and .*0.png has none"):
        load(folder)
    Image.new("RGB", (20, 20)).save(image)
    with pytest.raises(UserError, match=r"2.png is 20 × 20, and .*0.png is 30 × 20"):
        load(folder)
    for other in (folder / "images").iterdir():
        Image.new("RGBA", (30, 20)).save(other)
    assert load(folder).background == (1.0, 1.0, 1.0)
    Image.new("RGB", (30, 20)).save(image)
    with pytest.raises(UserError, match=r"0.png has an alpha channel, and .*2.png has none"):
        load(folder)
    image.unlink()
    with pytest.raises(UserError, match="5 images and 6 poses"):
        load(folder)


def test_a_folder_of_llff_of_two_views_or_another_table_is_refused(tmp_path: Path) -> None:
    folder, _ = forward_facing(tmp_path, 2)
    with pytest.raises(UserError, match="2 views to train on"):
        load(folder)
    np.save(folder / "poses_bounds.npy", np.zeros((2, 16)))
    with pytest.raises(UserError, match=r"the shape \[2, 16\]"):
        load(folder)
    for damaged in (b"none", b"", b"PK\x03\x04none"):
        (folder / "poses_bounds.npy").write_bytes(damaged)
        with pytest.raises(UserError, match=r"poses_bounds.npy cannot be read"):
            load(folder)
    np.save(folder / "poses_bounds.npy", np.full((2, 17), "1.0"))
    with pytest.raises(UserError, match=r"poses_bounds.npy is no array of numbers"):
        load(folder)
    np.save(folder / "poses_bounds.npy", np.zeros((0, 17)))
    for image in (folder / "images").iterdir():
        image.unlink()
    with pytest.raises(UserError, match="0 views to train on"):
        load(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transform_matrix": [[float("nan")] * 4] * 4}, "not finite"),
        ({"transform_matrix": [[1.0, 1.0, 0.0, 0.0]] * 4}, "singular"),
        ({"transform_matrix": [[1.0, 2.0]] * 4}, "transform_matrix"),
        ({"transform_matrix": "none"}, "of numbers"),
        ({"file_path": "nowhere"}, "not there"),
        ({"camera_angle_x": 0.0}, "lens"),
        ({"frames": []}, "no frames"),
        ({"box": [[0, 0, 0]]}, "has a box"),
        ({"box": [[0, 0, 0], [1, None, 1]]}, "has a box"),
        ({"box": [[1, 0, 0], [0, 1, 1]]}, "has a box"),
        ({"box": [[0, 0, 0], [1, 1, float("nan")]]}, "has a box"),
        ({"cx": float("nan")}, "optical center"),
        ({"w": -24}, "a width of -24"),
    ],
)
def test_a_bad_frame_is_named(folder: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(changed(folder, **values))


def test_cameras_that_turn_in_one_place_need_a_box(folder: Path) -> None:
    for file in folder.glob("transforms_*.json"):
        table = json.loads(file.read_text())
        for frame in table["frames"]:
            for row in frame["transform_matrix"][:3]:
                row[3] = 0.5
        file.write_text(json.dumps(table))
    with pytest.raises(UserError, match="do not look at one point from outside"):
        load(folder)
    assert load(changed(folder, box=[[-1, -1, -1], [2, 2, 2]])).box.tolist() == [[-1, -1, -1], [2, 2, 2]]


def in_all_files(folder: Path, **values: object) -> Path:
    for file in folder.glob("transforms_*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def test_files_of_different_lenses_and_sizes_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"transforms_.*has a focal length of .*, and .*transforms_"):
        load(changed(folder, camera_angle_x=1.2))
    in_all_files(folder, camera_angle_x=rendered_scenes.ANGLE, w=48, h=48)
    assert load(folder).lens.width == 24
    with pytest.raises(UserError, match=r"of images of 48 × 96 pixels, and its images have 24 × 24"):
        load(in_all_files(folder, h=96))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"fl_x": 40.0}, r"transforms_train.json, frame './train_1' has a focal length of 40.0 .*one of 30.0"),
        ({"camera_angle_x": 1.2}, "frame './train_1' has a focal length of 17.5"),
        ({"cx": 10.0}, "frame './train_1' has .* a center at 10.0, 12.0, and .* 12.0, 12.0"),
        ({"cy": 10.0}, "a center at 12.0, 10.0"),
        ({"w": 48}, "frame './train_1' (is of images of 48|has a focal length of 15.0)"),
        ({"h": 48}, "frame './train_1' is of images of 24 × 48 pixels"),
        ({"fl_x": "wide"}, "frame './train_1' says nothing of the lens"),
    ],
)
def test_a_frame_of_another_lens_than_its_file_is_named(folder: Path, own: dict[str, Any], message: str) -> None:
    in_all_files(folder, fl_x=30.0, w=24, h=24)
    frames = json.loads((folder / "transforms_train.json").read_text())["frames"]
    same = {"fl_x": 30.0, "cx": 12.0, "cy": 12, "w": 24, "h": 24}
    assert load(changed(folder, frames=[frame | same for frame in frames])).lens.focal == 30
    with pytest.raises(UserError, match=message):
        load(changed(folder, frames=[frames[0], frames[1] | own, *frames[2:]]))


def test_views_with_alpha_are_put_on_white_one_by_one(folder: Path) -> None:
    class Largest(TorchDispatchMode):
        values = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                self.values = max(self.values, made.untyped_storage().nbytes())
            return made

    paths, largest = sorted(folder.glob("*.png")), Largest()
    assert len(paths) >= 10
    with largest:
        images, _, _ = scenes.read_images(paths, lambda done, total: None)
    assert largest.values == images.numel()


def test_a_png_with_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (160, 160, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    whole = (tmp_path / "noise.png").read_bytes()
    second = whole.rindex(b"IDAT")
    assert second > whole.index(b"IDAT")
    (tmp_path / "noise.png").write_bytes(whole[:second] + bytes(4) + whole[second + 4 :])
    with pytest.raises(UserError, match=r"noise.png cannot be read: broken PNG"):
        scenes.read_images([tmp_path / "noise.png"], lambda done, total: None)


def test_grey_of_16_bits_is_read_as_that_of_8(tmp_path: Path) -> None:
    levels = np.arange(0, 65536, 4369, dtype=np.uint16).reshape(4, 4)
    Image.fromarray(levels).save(tmp_path / "grey.png")
    found, _, _ = scenes.read_images([tmp_path / "grey.png"], lambda done, total: None)
    assert found[0, :, :, 0].tolist() == (levels // 257).tolist()


def test_a_vertical_focal_length_and_a_distortion_are_honoured(folder: Path) -> None:
    """A ray through the picture point of a point in the world goes through that point."""
    bent = {"k1": 0.1, "k2": -0.02, "k3": 0.01, "p1": 0.004, "p2": -0.003}
    in_all_files(folder, fl_x=30.0, fl_y=40.0, **bent)
    found = load(folder)
    assert not found.notes
    across, down = np.float64(0.21), np.float64(-0.17)
    square = across**2 + down**2
    radial = 1 + 0.1 * square - 0.02 * square**2 + 0.01 * square**3
    x = across * radial + 2 * 0.004 * across * down - 0.003 * (square + 2 * across**2)
    y = down * radial + 0.004 * (square + 2 * down**2) + 2 * -0.003 * across * down
    plane = found.lens.on_plane(torch.tensor([12 + 30 * x]), torch.tensor([12 + 40 * y]))
    assert [float(value) for value in plane] == pytest.approx([across, down], abs=1e-6)
    assert scenes.of_cameras(json.loads(json.dumps(found.cameras()))).lens == found.lens
    in_all_files(folder, fl_y=None, camera_angle_y=2 * np.arctan(12 / 40))
    assert load(folder).lens.aspect == pytest.approx(4 / 3)


def test_a_lens_without_distortion_is_a_pinhole(folder: Path) -> None:
    plain = load(folder).lens
    in_all_files(folder, k1=0, camera_model="OPENCV", is_fisheye=False, rolling_shutter=[0.0, 0, 0, 0])
    assert load(folder).lens == plain
    assert load(folder).notes == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [({"k4": 0.1}, "has the key 'k4'"), ({"camera_model": "OPENCV_FISHEYE"}, "the camera_model OPENCV_FISHEYE"),
     ({"is_fisheye": True}, "has the key 'is_fisheye'"), ({"k1": -3.0}, "cannot be inverted .*k1 = -3.0"),
     ({"k1": "much"}, "cannot be inverted"), ({"fl_y": 0}, "vertical focal length of 0")],
)  # fmt: skip
@pytest.mark.parametrize("where", ["file", "frame"])
def test_a_lens_that_rays_cannot_follow_is_refused(
    folder: Path, given: dict[str, Any], message: str, where: str
) -> None:
    in_all_files(folder, fl_x=30.0)
    file = folder / "transforms_test.json"
    table = json.loads(file.read_text())
    (table["frames"][0] if where == "frame" else table).update(given)
    if where == "frame":
        table["frames"][0] |= {"fl_x": 30.0}
    file.write_text(json.dumps(table))
    with pytest.raises(UserError, match=message) as refusal:
        load(folder)
    assert refusal.value.do


def test_images_of_different_sizes_and_missing_alpha_are_named(folder: Path) -> None:
    Image.new("RGBA", (20, 24)).save(folder / "train_1.png")
    with pytest.raises(UserError, match=r"train_1.png is 20 × 24, and .*train_0.png is 24 × 24"):
        load(folder)
    Image.new("RGB", (24, 24)).save(folder / "train_1.png")
    with pytest.raises(UserError, match=r"train_0.png has an alpha channel, and .*train_1.png has none"):
        load(folder)
    for image in folder.glob("*.png"):
        Image.new("RGB", (24, 24)).save(image)
    assert "images without alpha" in load(folder).notes[0]
    Image.new("RGBA", (24, 24)).save(folder / "train_1.png")
    with pytest.raises(UserError, match=r"train_1.png has an alpha channel, and .*train_0.png has none"):
        load(folder)
    (folder / "train_1.png").write_bytes(b"none")
    with pytest.raises(UserError, match="cannot identify image"):
        load(folder)


def test_fewer_than_three_views_and_folders_without_a_scene_are_refused(folder: Path, tmp_path: Path) -> None:
    frames = json.loads((folder / "transforms_train.json").read_text())["frames"]
    with pytest.raises(UserError, match="2 views"):
        load(changed(folder, frames=frames[:2]))
    (folder / "transforms_train.json").write_text("[")
    with pytest.raises(UserError, match=r"transforms_train.json cannot be read: Expecting value"):
        load(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no scene"):
        load(tmp_path / "empty")
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="did you mean"):
        load("knot:view=8")
    with pytest.raises(UserError, match="not possible"):
        load("knot:views=0")


def test_one_file_holds_every_eighth_view_out(folder: Path) -> None:
    (folder / "transforms_train.json").rename(folder / "transforms.json")
    found = load(folder / "transforms.json")
    assert found.parts["val"] == [0]
    assert len(found.parts["train"]) == 7
