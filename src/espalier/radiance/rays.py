"""Cameras and rays: the rays of pixels, in the world or in normalized device coordinates, and poses round a scene.

A pose is a camera-to-world matrix in OpenGL's convention, as Blender writes it: the camera looks along its -z, and +y
is up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float32]


class Rays(NamedTuple):
    """Float tensors [rays, 3]: where rays begin, their unit directions, and the unit directions that colours see, which
    differ from those in normalized device coordinates alone."""

    origins: Tensor
    directions: Tensor
    views: Tensor


class Lens(NamedTuple):
    """What all cameras of a scene share.

    Attributes:
        width, height: pixels of an image.
        focal: horizontal focal length in pixels.
        center: the optical center (x, y) in pixels.
        aspect: the vertical focal length over `focal`.
        distortion: k1, k2, k3, p1, p2 of OpenCV's perspective model; empty: none.
    """

    width: int
    height: int
    focal: float
    center: tuple[float, float]
    aspect: float = 1.0
    distortion: tuple[float, ...] = ()

    @classmethod
    def of_angle(cls, width: int, height: int, angle: float) -> Lens:
        """Of a horizontal field of view in radians."""
        return cls(width, height, 0.5 * width / math.tan(0.5 * angle), (width / 2, height / 2))

    def resized(self, width: int, height: int) -> Lens:
        """The same view in other pixels. Sides in another proportion show more or less of the other side."""
        factor = width / self.width
        x = width / 2 + (self.center[0] - self.width / 2) * factor
        y = height / 2 + (self.center[1] - self.height / 2) * factor
        return self._replace(width=width, height=height, focal=self.focal * factor, center=(x, y))

    def on_plane(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Where on the plane at depth 1 the rays through image points (x, y), in pixels, pass; y points down."""
        across = (x - self.center[0]) / self.focal
        down = (y - self.center[1]) / (self.focal * self.aspect)
        return undistorted(across, down, self.distortion) if self.distortion else (across, down)


ITERATIONS = 20
"""Fixed-point iterations that invert a distortion; moderate ones converge in less than ten."""


def undistorted(
    x: Tensor, y: Tensor, distortion: tuple[float, ...], iterations: int = ITERATIONS
) -> tuple[Tensor, Tensor]:
    """Points on the plane at depth 1 that OpenCV's perspective model shows at (x, y), by fixed-point iteration."""
    k1, k2, k3, p1, p2 = distortion
    flat_x = x
    flat_y = y
    for _ in range(iterations):
        product = flat_x * flat_y
        square = flat_x * flat_x + flat_y * flat_y
        radial = 1 + square * (k1 + square * (k2 + square * k3))
        across = 2 * p1 * product + p2 * (square + 2 * flat_x * flat_x)
        down = p1 * (square + 2 * flat_y * flat_y) + 2 * p2 * product
        flat_x = (x - across) / radial
        flat_y = (y - down) / radial
    return flat_x, flat_y


def rays_of(lens: Lens, poses: Tensor, pixels: Tensor, forward: Lens | None = None) -> Rays:
    """Rays through the middle of pixels.

    Args:
        poses: float32 [rays, 4, 4], of each pixel's camera.
        pixels: int64 [rays], row * width + column.
        forward: lens of a forward-facing scene, in whose normalized device coordinates origins and directions are.
    """
    x, y = lens.on_plane(pixels % lens.width + 0.5, pixels // lens.width + 0.5)
    local = torch.stack([x, -y, -torch.ones_like(x)], 1).to(poses.dtype)
    directions = (poses[:, :3, :3] * local[:, None, :]).sum(2)  # no product of matrices: the same bits in any batch
    views = directions / directions.norm(dim=1, keepdim=True)
    if forward is None:
        return Rays(poses[:, :3, 3].contiguous(), views.contiguous(), views.contiguous())
    origins, towards = device_coordinates(forward, poses[:, :3, 3], directions)
    return Rays(origins, (towards / towards.norm(dim=1, keepdim=True)).contiguous(), views.contiguous())


def device_coordinates(lens: Lens, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Rays in normalized device coordinates with the near plane at depth 1: from z = -1 there to z = 1 at infinity
    (NeRF, arXiv 2003.08934, appendix C)."""
    t = -(1 + origins[:, 2]) / directions[:, 2]
    near = origins + t[:, None] * directions
    scale = torch.tensor([2 * lens.focal / lens.width, 2 * lens.focal / lens.height], dtype=origins.dtype)
    z = near[:, 2:]
    tangent = directions[:, :2] / directions[:, 2:]
    start = torch.cat([-scale * near[:, :2] / z, 1 + 2 / z], 1)
    end = torch.cat([-scale * tangent, torch.ones_like(z)], 1)
    return start, end - start


UP = np.array([0, 1, 0], np.float32)


def look_at(eye: Array, target: Array, up: Array = UP) -> Array:
    """The pose at `eye` that looks at `target`: float32 [4, 4]."""
    back = (eye - target) / np.linalg.norm(eye - target)
    right = np.cross(up, back)
    return pose_of_axes(right / np.linalg.norm(right), back, eye)


def pose_of_axes(right: Array, back: Array, eye: Array) -> Array:
    """The pose at `eye` with two of its axes, of length one: float32 [4, 4]."""
    pose = np.eye(4, dtype=np.float32)
    pose[:3, :3] = np.stack([right, np.cross(back, right), back], 1)
    pose[:3, 3] = eye
    return pose


def round_poses(count: int, radius: float, shift: float = 0.0) -> Array:
    """Poses spread evenly over a sphere but its poles, looking at its center: float32 [count, 4, 4]."""
    golden = math.pi * (3 - math.sqrt(5))
    poses = []
    for index in range(count):
        height = 0.85 - 1.25 * (index + 0.5) / count
        angle = golden * index + shift
        flat = math.sqrt(1 - height * height)
        eye = radius * np.array([flat * math.cos(angle), height, flat * math.sin(angle)], np.float32)
        poses.append(look_at(eye.astype(np.float32), np.zeros(3, np.float32)))
    return np.stack(poses)


def turntable_poses(poses: Array, count: int, forward: bool) -> Array:
    """A way round the scene at the height and distance of its cameras, or of a forward-facing scene a small circle."""
    center = poses[:, :3, 3].mean(0)
    up = poses[:, :3, 1].mean(0)
    angles = [2 * math.pi * index / count for index in range(count)]
    if forward:
        back = poses[:, :3, 2].mean(0)
        spread = 0.5 * np.abs(poses[:, :3, 3] - center).max()
        sideways = np.cross(up, back)
        return np.stack(
            [
                look_at(center + np.float32(spread) * (math.cos(a) * sideways + math.sin(a) * up), center - back, up)
                for a in angles
            ]
        )
    target = focus_of(poses)
    axis = np.zeros(3, np.float32)
    axis[np.abs(up).argmax()] = np.sign(up[np.abs(up).argmax()]) or 1.0
    sides = [other for other in range(3) if not axis[other]]
    radius = float(np.linalg.norm(poses[:, :3, 3] - target, axis=1).mean())
    around = np.zeros((count, 3), np.float32) + target + np.float32(0.35 * radius) * axis
    around[:, sides[0]] += 0.937 * radius * np.cos(angles)
    around[:, sides[1]] += 0.937 * radius * np.sin(angles)
    return np.stack([look_at(eye, target, axis) for eye in around])


def focus_of(poses: Array) -> Array:
    """The point nearest to all cameras' axes, by least squares: float32 [3]."""
    axes = poses[:, :3, 2].astype(np.float64)
    places = poses[:, :3, 3].astype(np.float64)
    across = np.eye(3) - axes[:, :, None] * axes[:, None, :]
    point = np.linalg.lstsq(across.sum(0), (across @ places[:, :, None]).sum(0)[:, 0], rcond=None)[0]
    return point.astype(np.float32)
