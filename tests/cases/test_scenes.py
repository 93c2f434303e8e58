"""Folders of scenes that other programs wrote: what is read, what is named, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from espalier.machine import resource_limits
from espalier.radiance import camera_poses, pictures, scenes
from espalier.radiance.rays import look_at
from espalier.radiance.scenes import Scene
from espalier.recipe.errors import UserError

VIEWS, SIDE = 12, 24
LENS = {"fl_x": 25.0, "fl_y": 25.0, "cx": 12.0, "cy": 12.0, "w": SIDE, "h": SIDE}


def load(path: Path) -> Scene:
    return scenes.load(str(path), None, lambda done, total: None)


def pose(angle: float) -> list[list[float]]:
    eye = np.float32([3.6 * math.cos(angle), 3.6 * math.sin(angle), 1.76])
    matrix: list[list[float]] = look_at(eye, np.zeros(3, np.float32), np.float32([0, 0, 1])).tolist()
    return matrix


def turned(matrix: list[list[float]]) -> list[list[float]]:
    """In the convention of OpenCV: y down, z forward."""
    return [[row[0], -row[1], -row[2], row[3]] for row in matrix[:3]] + [[0.0, 0, 0, 1]]


def colour(view: int) -> tuple[int, int, int]:
    return (200, 40 + 10 * view, 30)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    for view in range(VIEWS):
        Image.new("RGB", (SIDE, SIDE), colour(view)).save(folder / f"f{view:03}.png")
    return folder


@pytest.fixture
def scene(captured: Path, tmp_path: Path) -> Path:
    """A ring of cameras in one transforms.json, as nerfstudio writes it."""
    (tmp_path / "images").symlink_to(captured)
    return write(tmp_path)


def frames_of(angles: list[float] | None = None) -> list[dict[str, Any]]:
    angles = [2 * math.pi * view / VIEWS for view in range(VIEWS)] if angles is None else angles
    return [{"file_path": f"images/f{view:03}.png", "transform_matrix": pose(a)} for view, a in enumerate(angles)]


def write(folder: Path, frames: list[dict[str, Any]] | None = None, **table: Any) -> Path:
    content = {"camera_angle_x": 0.9, "frames": frames_of() if frames is None else frames} | table
    (folder / "transforms.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def refusal(folder: Path, match: str) -> str:
    with pytest.raises(UserError, match=match) as raised:
        load(folder)
    assert raised.value.do
    assert len(raised.value.what) < 700
    return str(raised.value)


def scene_or_sentence(folder: Path) -> Scene | None:
    """The scene; None where it is refused in one sentence."""
    try:
        return load(folder)
    except UserError as error:
        if not error.do or len(error.what) > 700:
            raise
        return None


# --- lens-in-frames ------------------------------------------------------------------------------------------------


def test_a_lens_that_every_frame_gives_is_read(scene: Path) -> None:
    table = {"frames": [frame | LENS for frame in frames_of()]}
    (scene / "transforms.json").write_text(json.dumps(table))
    assert load(scene).lens[:5] == (24, 24, 25.0, (12.0, 12.0), 1.0)


def test_two_frames_of_different_lenses_are_named(scene: Path) -> None:
    frames = [frame | LENS for frame in frames_of()]
    frames[7]["fl_x"] = frames[7]["fl_y"] = 31.0
    write(scene, frames, camera_angle_x=None)
    refusal(scene, r"frame 'images/f007.png' has a focal length of 31.0 .*, and .*frame 'images/f000.png' one of 25.0")


def test_frames_of_which_one_has_no_lens_are_named(scene: Path) -> None:
    frames = [frame | LENS for frame in frames_of()]
    frames[3] = frames_of()[3]
    write(scene, frames, camera_angle_x=None)
    refusal(scene, "frame 'images/f003.png' says nothing of the lens")


def test_a_lens_for_larger_pictures_is_scaled_and_said(scene: Path) -> None:
    frames = [frame | {"fl_x": 50.0, "fl_y": 50.0, "w": 48, "h": 48} for frame in frames_of()]
    found = load(write(scene, frames))
    assert found.lens.focal == 25
    assert "the lens is scaled from pictures 48 pixels wide to 24" in found.notes


# --- nerfstudio-split ----------------------------------------------------------------------------------------------


def names(*views: int) -> list[str]:
    return [f"images/f{view:03}.png" for view in views]


def test_nerfstudios_lists_are_the_parts(scene: Path) -> None:
    write(scene, train_filenames=names(*range(8)), val_filenames=names(8, 9), test_filenames=names(11, 10))
    assert load(scene).parts == {"train": list(range(8)), "val": [8, 9], "test": [10, 11]}


def test_frames_in_no_list_are_not_used_and_counted(scene: Path) -> None:
    found = load(write(scene, train_filenames=names(*range(8)), test_filenames=["./images/f009.png"]))
    assert found.parts == {"train": list(range(8)), "val": [9], "test": [9]}
    assert any(note.startswith("3 frames in none of train_filenames") for note in found.notes)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            {"train_filenames": names(*range(8)), "test_filenames": names(3, 9)},
            "f003.png' is in the training views and",
        ),
        ({"train_filenames": [*names(*range(8)), "images/none.png"]}, "names 'images/none.png' in train_filenames"),
        ({"train_filenames": names(0, 1), "val_filenames": names(3)}, "2 views to train on"),
        ({"val_filenames": names(3)}, "0 views to train on"),
        ({"train_filenames": "all"}, "in train_filenames, and no frame has that picture"),
        ({"train_filenames": [3]}, "in train_filenames, and no frame has that picture"),
    ],
)
def test_lists_that_fit_no_frames_are_refused(scene: Path, lists: dict[str, Any], message: str) -> None:
    refusal(write(scene, **lists), message)


def test_a_picture_in_two_files_of_blender_is_refused(scene: Path) -> None:
    for part, frames in (("train", frames_of()[:8]), ("test", frames_of()[7:])):
        (scene / f"transforms_{part}.json").write_text(json.dumps({"camera_angle_x": 0.9, "frames": frames}))
    refusal(scene, "'images/f007.png' is in the training views and in those held out")


def test_files_that_are_not_read_are_named(scene: Path) -> None:
    for part, frames in (("train", frames_of()[:8]), ("test", frames_of()[8:])):
        (scene / f"transforms_{part}.json").write_text(json.dumps({"camera_angle_x": 0.9, "frames": frames}))
    assert "not used: file 'transforms.json'" in load(scene).notes


# --- keys ------------------------------------------------------------------------------------------------------------


def test_keys_that_are_not_used_are_named_once(scene: Path) -> None:
    frames = [frame | {"sharpness": 31.0, "colmap_im_id": 4, "depth_file_path": "d.png"} for frame in frames_of()]
    found = load(write(scene, frames, ply_file_path="sparse.ply", applied_transform=[[1, 0]], aabb_scale=16))
    for key in ("sharpness", "colmap_im_id", "depth_file_path"):
        assert found.notes.count(f"not used: key {key!r} (12 frames)") == 1
    for key in ("ply_file_path", "applied_transform", "aabb_scale"):
        assert found.notes.count(f"not used: key {key!r} (1 file)") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mask_path", "masks/0.png"), ("k4", 0.01), ("is_fisheye", True), ("rolling_shutter", [0.1, 0, 0, 0]),
        ("w_ang_vel", [0, 1.0, 0]), ("scale", 0.33), ("offset", [0.5, 0.5, 0.5]), ("aabb", [[0, 0, 0], [1, 1, 1]]),
        ("from_na", True), ("transform_matrix_start", [[1]]), ("camera_linear_velocity", [1.0, 0, 0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_frame", [True, False])
def test_keys_that_change_what_others_mean_are_refused_by_name(
    scene: Path, key: str, value: object, in_frame: bool
) -> None:
    frames = frames_of()
    if in_frame:
        frames[5][key] = value
    text = refusal(write(scene, frames, **({} if in_frame else {key: value})), f"has the key '{key}'")
    assert ("f005.png" in text) == in_frame


def test_keys_that_would_change_something_and_are_zero_are_read_over(scene: Path) -> None:
    table = {"k4": 0, "is_fisheye": False, "scale": 1.0, "offset": [0, 0, 0], "mask_path": None, "rolling_shutter": []}
    assert not [note for note in load(write(scene, **table)).notes if "without alpha" not in note]


def test_a_scene_that_moves_is_refused(scene: Path) -> None:
    frames = [frame | {"time": 0.0} for frame in frames_of()]
    assert load(write(scene, frames)).images.shape[0] == VIEWS
    frames[4]["time"] = 0.6
    refusal(write(scene, frames), "has the key 'time'")


# --- poses -----------------------------------------------------------------------------------------------------------


def test_poses_in_the_convention_of_opencv_are_refused_and_both_are_named(scene: Path) -> None:
    frames = [frame | {"transform_matrix": turned(frame["transform_matrix"])} for frame in frames_of()]
    text = refusal(write(scene, frames), "12 of 12 cameras of .* look away from the scene")
    assert all(word in text for word in ("OpenGL", "OpenCV", "COLMAP", "negate the second and third column"))
    refusal(write(scene, frames, box=[[-1, -1, -1], [1, 1, 1]]), "look away from the scene")


def test_cameras_that_look_outwards_need_a_box(scene: Path) -> None:
    frames = [frame | {"transform_matrix": turned(frame["transform_matrix"])} for frame in frames_of()]
    found = load(write(scene, frames, box=[[-9, -9, -9], [9, 9, 9]]))
    assert found.box.tolist() == [[-9, -9, -9], [9, 9, 9]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [[*row[:2], -row[2], row[3]] for row in rows[:3]], "that is no rotation"),
        (lambda rows: [[row[0], row[1] + 0.5 * row[0], *row[2:]] for row in rows], "that is no rotation"),
        (lambda rows: [[3 * row[0], *row[1:]] for row in rows], "that is no rotation"),
        (lambda rows: np.array(rows).T.tolist(), "a transform_matrix that ends in"),
        (lambda rows: rows[:2], "no transform_matrix of numbers"),
        (lambda rows: [*rows, rows[3]], "no transform_matrix of numbers"),
        (lambda rows: [row[:3] for row in rows], "no transform_matrix of numbers"),
        (lambda rows: [[str(cell) for cell in row] for row in rows], "not finite"),
        (lambda rows: [[True, *row[1:]] for row in rows], "not finite"),
        (lambda rows: [[10**400, *row[1:]] for row in rows], "not finite"),
        (lambda rows: [[0.0] * 4] * 4, "singular"),
        (lambda rows: {"a": 1}, "no transform_matrix of numbers"),
    ],
)
def test_a_matrix_that_is_no_pose_is_named(scene: Path, change: Any, message: str) -> None:
    frames = frames_of()
    frames[5]["transform_matrix"] = change(frames[5]["transform_matrix"])
    assert "f005.png" in refusal(write(scene, frames), message)


def test_frames_listed_twice_are_read_once_and_said(scene: Path) -> None:
    found = load(write(scene, [*frames_of(), *frames_of()[:2]]))
    assert len(found.images) == VIEWS
    assert "2 frames listed twice" in found.notes


def test_views_of_one_picture_stay_on_one_side_and_are_said(scene: Path) -> None:
    frames = frames_of()
    for view in (3, 5):
        frames[view]["file_path"] = "images/f000.png"
    found = load(write(scene, frames))
    assert set(found.parts["val"]) >= {0, 3, 5}
    assert not set(found.parts["val"]) & set(found.parts["train"])
    assert "f000.png is the picture of 3 views with different cameras" in found.notes


def test_missing_pictures_are_counted(scene: Path) -> None:
    frames = [frame | {"file_path": frame["file_path"].replace("f01", "g01")} for frame in frames_of()]
    refusal(write(scene, frames), r"names an image 'images/g010.png' \(and 1 more\) that is not there")


def test_endings_may_be_missing_or_in_capitals(captured: Path, tmp_path: Path) -> None:
    for view in range(VIEWS):
        (tmp_path / f"f{view:03}.PNG").symlink_to(captured / f"f{view:03}.png")
    frames = frames_of()
    for view, frame in enumerate(frames):
        frame["file_path"] = f"./f{view:03}" if view % 2 else f"./f{view:03}.PNG"
    found = load(write(tmp_path, frames))
    assert tuple(found.images[7, 3, 3].tolist()) == colour(7)


def test_a_byte_order_mark_is_skipped(scene: Path) -> None:
    file = scene / "transforms.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert len(load(scene).images) == VIEWS


# --- transforms-numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e999, "9" * 400, None, True, [1], {}], ids=str)
@pytest.mark.parametrize("key", ["w", "h", "fl_x", "fl_y", "cx", "cy", "camera_angle_x", "k1", "box"])
def test_a_number_that_is_none_is_one_sentence(scene: Path, key: str, value: object) -> None:
    write(scene, **{key: value})
    found = scene_or_sentence(scene)
    needed = key in ("box", "camera_angle_x")
    assert (found is None) == (value is not None or needed)


@pytest.mark.parametrize(
    ("name", "message"),
    [("a" * 5000, "names an image 'aaa.*a…' .*not there"), ("a\0b", "not there"), ("\ud800", "not there"),
     (7, "frame 2 has no file_path"), ("", "names an image ''"), (".", "not there"), ("images", "not there")],
)  # fmt: skip
def test_a_name_that_is_none_is_one_sentence(scene: Path, name: object, message: str) -> None:
    frames = frames_of()
    frames[2]["file_path"] = name
    refusal(write(scene, frames), message)


@pytest.mark.parametrize(
    "content",
    [b'{"w": ' + b"9" * 5000 + b"}", b"[" * 100_000, b"[]", b"3", b"", b"\xff\xfe{\0}\0", b'{"frames": [1]}', b"\x80"],
    ids=range(8),
)
def test_a_file_that_is_no_table_is_one_sentence(scene: Path, content: bytes) -> None:
    (scene / "transforms.json").write_bytes(content)
    refusal(scene, "transforms.json")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.integers(0, 10**6), min_size=1, max_size=4), letter=st.integers(0, 255))
def test_a_damaged_file_is_one_sentence_or_a_scene(scene: Path, places: list[int], letter: int) -> None:
    whole = write(scene, camera_angle_x=0.9, box=[[-1, -1, -1], [1, 1, 1]], w=24, h=24)
    content = bytearray((whole / "transforms.json").read_bytes())
    for place in places:
        content[place % len(content)] = letter
    (scene / "transforms.json").write_bytes(bytes(content))
    found = scene_or_sentence(scene)
    assert found is None or bool(found.poses.isfinite().all())


# --- png-bomb and other pictures -------------------------------------------------------------------------------------


def bomb(folder: Path, side: int) -> Path:
    Image.new("L", (side, side)).save(folder / "a.png", compress_level=9)
    return write(folder, [frame | {"file_path": "a.png"} for frame in frames_of()])


def test_pixels_are_compared_with_memory_before_any_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb(tmp_path, 1000)
    for name in ("free_memory", "memory"):
        monkeypatch.setattr(resource_limits, name, lambda: 40_000_000)
    monkeypatch.setattr(pictures, "_decoded", None)
    refusal(
        tmp_path,
        r"12 views of 1,000,000 pixels .* does not fit into memory.(.|\n)*takes 53.4 MiB, and 38.1 MiB are free",
    )


def test_each_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb(tmp_path, 30)
    calls = []
    decode = pictures._decoded
    monkeypatch.setattr(pictures, "_decoded", lambda path, alpha: calls.append(path) or decode(path, alpha))
    frames = frames_of()
    scene = pictures.read_images([tmp_path / "a.png"] * len(frames), lambda done, total: None)
    assert scene[0].shape == (12, 30, 30, 3)
    assert len(calls) == 1


def test_a_picture_of_more_pixels_than_pillow_opens_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    refusal(bomb(tmp_path, 30), r"a.png cannot be read: .*pixels")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)  # Pillow warns
    assert pictures.headers([tmp_path / "a.png"])[0].width == 30


def picture(folder: Path, image: Image.Image, name: str = "a.png", **options: Any) -> torch.Tensor:
    image.save(folder / name, **options)
    assert pictures.headers([folder / name])[0][:2] == image.size
    return pictures.read_images([folder / name], lambda done, total: None)[0][0]


PIXELS = np.array([[[10, 20, 30], [250, 128, 0]], [[0, 0, 0], [255, 255, 255]]], np.uint8)


def test_colours_of_every_kind_become_red_green_and_blue(tmp_path: Path) -> None:
    colours, grey = Image.fromarray(PIXELS), Image.fromarray(PIXELS[:, :, 0])
    plain = torch.from_numpy(PIXELS)
    assert torch.equal(picture(tmp_path, colours), plain)
    assert torch.equal(picture(tmp_path, colours.quantize(4)), plain)
    assert torch.equal(picture(tmp_path, grey), plain[:, :, :1].expand(2, 2, 3))
    deep = Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 257)
    assert torch.equal(picture(tmp_path, deep), plain[:, :, :1].expand(2, 2, 3))
    assert torch.equal(picture(tmp_path, deep, "a.tiff"), plain[:, :, :1].expand(2, 2, 3))
    bits = Image.fromarray(PIXELS[:, :, 0] > 9).convert("1")
    assert picture(tmp_path, bits)[:, :, 0].tolist() == [[255, 255], [0, 255]]


def test_alpha_of_every_kind_is_put_on_white(tmp_path: Path) -> None:
    clear = Image.fromarray(np.array([[[100, 0], [100, 255]]], np.uint8), "LA")
    assert picture(tmp_path, clear)[0, :, 0].tolist() == [255, 100]
    palette = Image.fromarray(PIXELS).quantize(4)
    first = palette.getpixel((0, 0))
    assert picture(tmp_path, palette, transparency=first)[0, 0].tolist() == [255, 255, 255]
    assert picture(tmp_path, Image.fromarray(PIXELS), transparency=(10, 20, 30))[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize(("mode", "name"), [("CMYK", "a.jpg"), ("F", "a.tiff"), ("LAB", "a.tiff"), ("I", "a.tiff")])
def test_colours_that_need_a_profile_or_a_range_are_refused(tmp_path: Path, mode: str, name: str) -> None:
    with pytest.raises(UserError, match=f"its colours are {mode}, which are not converted; save it as RGB"):
        picture(tmp_path, Image.new(mode, (4, 4)), name)


def test_a_picture_on_its_side_is_said(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[pictures.ORIENTATION] = 6
    Image.new("RGB", (4, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert "EXIF orientation of 1 picture is not applied" in pictures.headers([tmp_path / "a.jpg"])[1][0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), letters=st.binary(min_size=1, max_size=4), cut=st.integers(0, 10**6))
def test_a_damaged_picture_is_one_sentence_or_a_picture(tmp_path: Path, place: int, letters: bytes, cut: int) -> None:
    file = tmp_path / "a.png"
    Image.fromarray(np.arange(24 * 24 * 3, dtype=np.uint8).reshape(24, 24, 3)).save(file)
    content = bytearray(file.read_bytes())
    place %= len(content)
    content[place : place + len(letters)] = letters
    file.write_bytes(bytes(content[: max(1, cut % (2 * len(content)))]))
    try:
        pictures.headers([file])
        shape = pictures.read_images([file], lambda done, total: None)[0].shape
    except UserError as error:
        shape = (str(file) in error.what, 1, 1, 3)
    assert shape[0] == 1
    assert shape[3] == 3


# --- LLFF ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def llff(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    rows = []
    for view in range(5):
        matrix = look_at(np.float32([0.3 * view - 0.7, 0.2 * (view % 2), 0]), np.float32([0, 0, -8]))
        axes = np.stack([-matrix[:3, 1], matrix[:3, 0], matrix[:3, 2]], 1)
        rows.append([*np.concatenate([axes, matrix[:3, 3:], [[20], [30], [25]]], 1).ravel(), 4.0, 10.0])
        Image.new("RGB", (30, 20), colour(view)).save(tmp_path / "images" / f"{view}.JPG")
    np.save(tmp_path / "poses_bounds.npy", np.array(rows))
    return tmp_path


def test_other_files_beside_llffs_are_named(llff: Path) -> None:
    (llff / "images" / "notes.txt").write_text("no picture")
    write(llff)
    notes = load(llff).notes
    assert "not used: file 'transforms.json'" in notes
    assert "not used: 1 file of images/ that are no PNG or JPEG" in notes


def test_pictures_on_their_side_do_not_fit_llffs_table(llff: Path) -> None:
    for path in (llff / "images").iterdir():
        Image.new("RGB", (20, 30)).save(path)
    refusal(llff, "of images of 30 × 20 pixels, and its images have 20 × 30")


@pytest.mark.parametrize(
    "table",
    [np.array([[{}] * 17] * 5, object), np.zeros(17), np.zeros((5, 3, 5)), np.zeros((5, 17), complex), np.array("a")],
    ids=["objects", "one row", "three axes", "complex", "text"],
)
def test_a_table_that_llff_did_not_write_is_refused(llff: Path, table: Any) -> None:
    np.save(llff / "poses_bounds.npy", table)
    refusal(llff, "poses_bounds.npy")


def test_a_table_that_claims_more_rows_than_it_holds_is_refused(llff: Path) -> None:
    content = (llff / "poses_bounds.npy").read_bytes().replace(b"(5, 17), ", b"(10**9, 17), "[:9])
    (llff / "poses_bounds.npy").write_bytes(content.replace(b"(10**9, 1", b"(5000, 17"))
    refusal(llff, "poses_bounds.npy cannot be read")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), letters=st.binary(min_size=1, max_size=8))
def test_a_damaged_table_is_one_sentence_or_a_scene(llff: Path, place: int, letters: bytes) -> None:
    file = llff / "poses_bounds.npy"
    whole = file.read_bytes()
    place %= len(whole)
    file.write_bytes(whole[:place] + letters + whole[place + len(letters) :])
    try:
        found = scene_or_sentence(llff)
        assert found is None or bool(found.poses.isfinite().all())
    finally:
        file.write_bytes(whole)


def test_numbers_of_json_are_floats_or_none() -> None:
    for value in (True, None, "1", [1]):
        assert math.isnan(camera_poses.number_of(value))
    assert camera_poses.number_of(10**400) == math.inf
    assert camera_poses.number_of(3) == 3.0


# --- spellings of other programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["images\\f{:03}.png", "images/f{:03}.PNG", ".\\images\\f{:03}.Png"])
def test_pictures_are_found_by_the_names_that_windows_gives_them(scene: Path, name: str) -> None:
    frames = [frame | {"file_path": name.format(view)} for view, frame in enumerate(frames_of())]
    found = load(write(scene, frames))
    assert [image[0, 0].tolist() for image in found.images] == [list(colour(view)) for view in range(VIEWS)]


@pytest.mark.parametrize("key", ["skew", "b1", "b2", "mask", "mask_file_path", "masks_path"])
def test_other_names_of_masks_and_bent_lenses_are_refused_too(scene: Path, key: str) -> None:
    refusal(write(scene, **{key: 0.5}), f"has the key '{key}'")


@pytest.mark.parametrize("center", [(500, 12), (12, -1), (0.5, 0.5)])
def test_an_optical_center_outside_of_pictures_or_in_shares_of_them_is_refused(
    scene: Path, center: tuple[float, float]
) -> None:
    refusal(write(scene, **(LENS | {"cx": center[0], "cy": center[1]})), "has an optical center")


def test_files_beside_the_one_that_is_named_are_named(scene: Path) -> None:
    (scene / "transforms_test.json").write_text("{}")
    assert "not used: file 'transforms_test.json'" in load(scene / "transforms.json").notes
