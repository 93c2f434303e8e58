"""Scenes that the program renders itself: spheres (analytic) and a torus knot (a mesh), anti-aliased.

`spheres:` and `knot:` take options, as in `spheres:views=60,size=100`. Shading is ambient, diffuse and a highlight that
moves with the view (Phong), so that a field without view directions loses quality. Each pixel is the mean of 3 x 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from espalier.radiance.rays import Array, Lens, rays_of, round_poses
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError, nearest

KINDS = ("spheres", "knot")
RADIUS = 3.2
"""How far cameras are from the middle."""
ANGLE = math.radians(34)
FINER = 3
"""Rays for each side of a pixel."""
_LIGHT = (0.48, 0.8, 0.36)
_EXPONENT = 20
_HIGHLIGHT = 0.35
_AMBIENT = 0.4


@dataclass(frozen=True)
class Made:
    """A scene to be rendered: training views, and an eighth of that (three at least) for validation and for the test;
    `size`: pixels of a side."""

    kind: str
    views: int = 60
    size: int = 100


class Views(NamedTuple):
    """Rendered views: uint8 [views, size, size, 4], colours not multiplied by alpha; poses: float32 [views, 4, 4]."""

    images: Tensor
    poses: Array


def parse(path: str) -> Made:
    """What a path such as `spheres:views=20,size=64` says. Raises UserError for what it cannot mean."""
    kind, _, rest = path.partition(":")
    names = [field.name for field in fields(Made)][1:]
    options = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in names:
            raise UserError(
                f"data.path = {path!r} has an option {name!r}.",
                do=f"did you mean {nearest(name, names) or names[0]!r}?",
            )
        if not value.isdecimal() or not 3 <= int(value) <= 4096:
            raise UserError(f"data.path = {path!r}: {name} = {value!r} is not possible.", do="a number from 3 to 4096")
        options[name] = int(value)
    return Made(kind, **options)


def lens_of(made: Made) -> Lens:
    """What its views are seen through."""
    return Lens.of_angle(made.size, made.size, ANGLE)


def render(made: Made) -> dict[str, Views]:
    """The views of training, validation and test."""
    held_out = max(3, made.views // 8)
    views = {}
    for part, count, shift in (("train", made.views, 0.0), ("val", held_out, 0.7), ("test", held_out, 1.9)):
        poses = round_poses(count, RADIUS, shift)
        views[part] = Views(torch.stack([render_view(made.kind, lens_of(made), pose) for pose in poses]), poses)
    return views


def render_view(kind: str, lens: Lens, pose: Array) -> Tensor:
    """One anti-aliased view: uint8 [height, width, 4]."""
    fine = lens.resized(FINER * lens.width, FINER * lens.height)
    rendered = _spheres(fine, pose) if kind == "spheres" else _mesh(fine, pose)
    cells = rendered.view(lens.height, FINER, lens.width, FINER, 4)
    alpha = cells[..., 3:].mean((1, 3))
    colours = (cells[..., :3] * cells[..., 3:]).mean((1, 3)) / alpha.clamp(min=1e-6)
    return (torch.cat([colours, alpha], -1).clamp(0, 1) * 255).round().to(torch.uint8)


def _shaded(albedo: Tensor, normals: Tensor, towards: Tensor) -> Tensor:
    """Colours [points, 3]; `towards`: unit directions from the points to the camera."""
    light = torch.tensor(_LIGHT)
    light = light / light.norm()
    facing = (normals * light).sum(1, keepdim=True)
    mirrored = 2 * facing * normals - light
    shine = (mirrored * towards).sum(1, keepdim=True).clamp(min=0) ** _EXPONENT * (facing > 0)
    return albedo * (_AMBIENT + (1 - _AMBIENT) * facing.clamp(min=0)) + _HIGHLIGHT * shine


# --- spheres ---------------------------------------------------------------------------------------------------------

_SPHERES = data_table(__file__)["spheres"]


def _spheres(lens: Lens, pose: Array) -> Tensor:
    pixels = torch.arange(lens.width * lens.height)
    origins, directions, _ = rays_of(lens, torch.from_numpy(pose).expand(len(pixels), 4, 4), pixels)
    nearest_ = torch.full((len(pixels),), math.inf)
    which = torch.full((len(pixels),), -1)
    for index, (center, radius, _) in enumerate(_SPHERES):
        apart = origins - torch.tensor(center)
        b = (apart * directions).sum(1)
        c = apart.square().sum(1) - radius**2
        t = -b - (b * b - c).clamp(min=0).sqrt()
        closer = (b * b > c) & (t > 0) & (t < nearest_)
        nearest_ = torch.where(closer, t, nearest_)
        which = torch.where(closer, index, which)
    hit = which >= 0
    points = origins[hit] + nearest_[hit, None] * directions[hit]
    centers, colours = (torch.tensor([column[at] for column in _SPHERES])[which[hit]] for at in (0, 2))
    normals = torch.nn.functional.normalize(points - centers, dim=1)
    bands = 0.5 + 0.5 * torch.sin(9 * normals[:, 1:2] + 3 * torch.atan2(normals[:, 2:], normals[:, :1]))
    pixels_rgba = torch.zeros(len(pixels), 4)
    pixels_rgba[hit] = torch.cat(
        [_shaded(colours * (0.55 + 0.45 * bands), normals, -directions[hit]), torch.ones(len(points), 1)], 1
    )
    return pixels_rgba


# --- a mesh ----------------------------------------------------------------------------------------------------------


class TriangleMesh(NamedTuple):
    """Float32 [vertices, 3] each of places, unit normals and colours; int64 [triangles, 3]."""

    vertices: Tensor
    normals: Tensor
    colours: Tensor
    triangles: Tensor


def torus_knot(around: int = 240, across: int = 18) -> TriangleMesh:
    """A (2, 3) torus knot as a tube of triangles."""
    t = torch.arange(around) * (2 * math.pi / around)
    distance = 0.52 + 0.2 * torch.cos(3 * t)
    spine = torch.stack([distance * torch.cos(2 * t), 0.3 * torch.sin(3 * t), distance * torch.sin(2 * t)], 1)
    along = torch.nn.functional.normalize(spine.roll(-1, 0) - spine.roll(1, 0), dim=1)
    side = torch.nn.functional.normalize(
        torch.linalg.cross(along, torch.tensor([0.0, 1.0, 0.0]).expand_as(along)), dim=1
    )
    other = torch.linalg.cross(side, along)
    turn = torch.arange(across) * (2 * math.pi / across)
    normals = torch.cos(turn)[None, :, None] * side[:, None] + torch.sin(turn)[None, :, None] * other[:, None]
    hues = t[:, None, None] + torch.tensor([0.0, 2.1, 4.2]) + 0.0 * turn[None, :, None]
    stripes = 0.75 + 0.25 * torch.sin(3 * turn)[None, :, None]
    i = torch.arange(around)[:, None]
    j = torch.arange(across)[None]
    a = i * across + j
    b = (i + 1) % around * across + j
    c = i * across + (j + 1) % across
    d = (i + 1) % around * across + (j + 1) % across
    triangles = torch.cat([torch.stack([a, b, c], -1).view(-1, 3), torch.stack([b, d, c], -1).view(-1, 3)])
    vertices = spine[:, None] + 0.17 * normals
    colours = (0.55 + 0.4 * torch.sin(hues)) * stripes
    return TriangleMesh(vertices.view(-1, 3), normals.reshape(-1, 3), colours.reshape(-1, 3), triangles)


def _mesh(lens: Lens, pose: Array) -> Tensor:
    from espalier.radiance import volume_rendering_cpu as volume_cpu

    mesh = torus_knot()
    matrix = torch.from_numpy(pose)
    seen = (mesh.vertices - matrix[:3, 3]) @ matrix[:3, :3]
    depth = -seen[:, 2]
    x = lens.center[0] + lens.focal * seen[:, 0] / depth
    y = lens.center[1] - lens.focal * seen[:, 1] / depth
    size = lens.width * lens.height
    which = torch.full((size,), -1)
    parts = torch.zeros(size, 3)
    volume_cpu.rasterize(torch.stack([x, y, depth], 1).contiguous(), mesh.triangles, lens.width, which, parts)
    hit = which >= 0
    corners = mesh.triangles[which[hit]]
    shares = parts[hit][:, :, None]
    places, normals, albedo = ((rows[corners] * shares).sum(1) for rows in (mesh.vertices, mesh.normals, mesh.colours))
    towards = torch.nn.functional.normalize(matrix[:3, 3] - places, dim=1)
    colours = _shaded(albedo, torch.nn.functional.normalize(normals, dim=1), towards)
    pixels_rgba = torch.zeros(size, 4)
    pixels_rgba[hit] = torch.cat([colours, torch.ones(len(colours), 1)], 1)
    return pixels_rgba
