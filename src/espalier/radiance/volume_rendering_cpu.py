"""Rays through grids on the CPU, in numba: samples, trilinear lookup, compositing (see volume.py), and a rasterizer."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from espalier.kernels.numba_compile import jit, njit


@njit
def crossing(ray: Any, how: Any) -> Any:
    """(where a ray enters the box, how many steps it has there). `how`: `March.packed`."""
    first = how[6]
    last = how[7]
    for axis in range(3):
        origin = ray[axis]
        direction = ray[3 + axis]
        if abs(direction) < 1e-9:
            if origin < how[axis] or origin > how[3 + axis]:
                return first, 0
            continue
        near = (how[axis] - origin) / direction
        two = (how[3 + axis] - origin) / direction
        first = max(first, min(near, two))
        last = min(last, max(near, two))
    return first, max(0, int(np.ceil((last - first) / how[8] - np.float32(0.5))))


@njit
def sample_of(ray: Any, how: Any, mask: Any, t: Any) -> Any:
    """The point at a distance, and whether the mask's nearest cell is occupied."""
    x = ray[0] + t * ray[3]
    y = ray[1] + t * ray[4]
    z = ray[2] + t * ray[5]
    i = int(np.rint((x - how[9]) * how[12]))
    j = int(np.rint((y - how[10]) * how[13]))
    k = int(np.rint((z - how[11]) * how[14]))
    inside = 0 <= i < mask.shape[0] and 0 <= j < mask.shape[1] and 0 <= k < mask.shape[2]
    return x, y, z, inside and mask[i, j, k]


@jit("(float32[:, ::1], float32[::1], boolean[:, :, ::1], int64[::1])", parallel=True)
def count_samples(rays: Any, how: Any, mask: Any, counts: Any) -> None:
    """How many samples each ray has. `rays`: origin and direction."""
    for ray in numba.prange(len(rays)):
        first, steps = crossing(rays[ray], how)
        count = 0
        for at in range(steps):
            count += sample_of(rays[ray], how, mask, first + (np.float32(at) + np.float32(0.5)) * how[8])[3]
        counts[ray] = count


@jit("(float32[:, ::1], float32[::1], boolean[:, :, ::1], int64[::1], float32[:, ::1], int64[::1])", parallel=True)
def fill_samples(rays: Any, how: Any, mask: Any, offsets: Any, out: Any, numbers: Any) -> None:
    """The samples of each ray: places and distance in a row of `out`, and their numbers on the ray."""
    for ray in numba.prange(len(rays)):
        first, steps = crossing(rays[ray], how)
        place = offsets[ray]
        for at in range(steps):
            t = first + (np.float32(at) + np.float32(0.5)) * how[8]
            x, y, z, occupied = sample_of(rays[ray], how, mask, t)
            if occupied:
                out[place, 0] = x
                out[place, 1] = y
                out[place, 2] = z
                out[place, 3] = t
                numbers[place] = at
                place += 1


@njit
def corner_of(point: Any, frame: Any, sizes: Any, axis: Any) -> Any:
    """(lower cell, share of the upper one) of a point along an axis, moved into the grid."""
    place = (point[axis] - frame[axis]) * frame[3 + axis]
    place = min(max(place, place * 0), place * 0 + sizes[axis] - 1)
    low = min(int(place), sizes[axis] - 2)
    return low, place - low


@jit("(real[:, :, :, ::1], real[:, ::1], real[::1], real[:, ::1])", parallel=True)
def interpolate(grid: Any, points: Any, frame: Any, out: Any) -> None:
    """The mean of the eight corners round each point, by nearness."""
    columns = grid.shape[3]
    for at in numba.prange(len(points)):
        i, x = corner_of(points[at], frame, grid.shape, 0)
        j, y = corner_of(points[at], frame, grid.shape, 1)
        k, z = corner_of(points[at], frame, grid.shape, 2)
        for column in range(columns):
            out[at, column] = 0
        for corner in range(8):
            a = corner >> 2
            b = (corner >> 1) & 1
            c = corner & 1
            share = (x if a else 1 - x) * (y if b else 1 - y) * (z if c else 1 - z)
            for column in range(columns):
                out[at, column] += share * grid[i + a, j + b, k + c, column]


@jit("(real[:, ::1], real[:, ::1], real[::1], real[:, :, :, ::1])")
def scatter(gradient: Any, points: Any, frame: Any, out: Any) -> None:
    """Adds the gradient of each lookup to its eight corners. One thread: sums in the order of the points."""
    columns = out.shape[3]
    for at in range(len(points)):
        i, x = corner_of(points[at], frame, out.shape, 0)
        j, y = corner_of(points[at], frame, out.shape, 1)
        k, z = corner_of(points[at], frame, out.shape, 2)
        for corner in range(8):
            a = corner >> 2
            b = (corner >> 1) & 1
            c = corner & 1
            share = (x if a else 1 - x) * (y if b else 1 - y) * (z if c else 1 - z)
            for column in range(columns):
                out[i + a, j + b, k + c, column] += share * gradient[at, column]


@jit("(real[::1], int64[::1], real[::1], real[::1])", parallel=True)
def composite(alpha: Any, offsets: Any, weights: Any, rest: Any) -> None:
    """Each sample's weight, and what passes the ray's last sample."""
    for ray in numba.prange(len(offsets) - 1):
        passing = rest[ray] * 0 + 1
        for at in range(offsets[ray], offsets[ray + 1]):
            weights[at] = passing * alpha[at]
            passing *= 1 - alpha[at]
        rest[ray] = passing


@jit("(real[::1], int64[::1], real[::1], real[::1], real[::1])", parallel=True)
def composite_backward(alpha: Any, offsets: Any, of_weights: Any, of_rest: Any, out: Any) -> None:
    """d/d alpha_i = T_i (g_i - R_i), where R_i = g_{i+1} alpha_{i+1} + (1 - alpha_{i+1}) R_{i+1} is what the light that
    passes i brings: nothing is divided by 1 - alpha. `out` holds R until T is known."""
    for ray in numba.prange(len(offsets) - 1):
        brought = of_rest[ray]
        for back in range(offsets[ray + 1] - offsets[ray]):
            at = offsets[ray + 1] - 1 - back
            out[at] = of_weights[at] - brought
            brought = of_weights[at] * alpha[at] + (1 - alpha[at]) * brought
        passing = brought * 0 + 1
        for at in range(offsets[ray], offsets[ray + 1]):
            out[at] *= passing
            passing *= 1 - alpha[at]


@jit("(float32[:, ::1], int64[:, ::1], int64, int64[::1], float32[:, ::1])")
def rasterize(corners: Any, triangles: Any, width: Any, which: Any, parts: Any) -> None:
    """The nearest triangle of each pixel, -1: none, and its corners' shares, right in perspective. `corners`: x and y
    in pixels, and depth."""
    height = len(which) // width
    depths = np.full(len(which), np.inf, np.float32)
    for t in range(len(triangles)):
        ax, ay, az = corners[triangles[t, 0]]
        bx, by, bz = corners[triangles[t, 1]]
        cx, cy, cz = corners[triangles[t, 2]]
        area = (bx - ax) * (cy - ay) - (by - ay) * (cx - ax)
        if min(az, bz, cz) <= 0 or area == 0:
            continue
        for row in range(max(0, int(min(ay, by, cy))), min(height, int(max(ay, by, cy)) + 1)):
            for column in range(max(0, int(min(ax, bx, cx))), min(width, int(max(ax, bx, cx)) + 1)):
                x = np.float32(column + 0.5)
                y = np.float32(row + 0.5)
                a = ((bx - x) * (cy - y) - (by - y) * (cx - x)) / area
                b = ((cx - x) * (ay - y) - (cy - y) * (ax - x)) / area
                c = 1 - a - b
                if a < 0 or b < 0 or c < 0:
                    continue
                inverse = a / az + b / bz + c / cz
                pixel = row * width + column
                if 1 / inverse < depths[pixel]:
                    depths[pixel] = 1 / inverse
                    which[pixel] = t
                    parts[pixel, 0] = a / az / inverse
                    parts[pixel, 1] = b / bz / inverse
                    parts[pixel, 2] = c / cz / inverse
