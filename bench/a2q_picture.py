"""The picture of bench/a2q.py: accuracy against bytes of the hidden features, a panel for each data set."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Lines = dict[str, list[tuple[float, float]]]
"""By policy, points (KiB, accuracy in per cent)."""

SCALE, WIDTH, HEIGHT = 2, 430, 320
LEFT, TOP, RIGHT, BOTTOM = 40, 34, 14, 36
COLOURS = {"uniform": "#888888", "a2q": "#0b6e99", "mega": "#d9730d", "fp32": "#222222"}


class Panel:
    """A data set's axes, `at` so many panels from the left."""

    def __init__(self, draw: ImageDraw.ImageDraw, at: int, lines: Lines) -> None:
        self.draw, self.left, self.font = draw, at * WIDTH, ImageFont.load_default(11 * SCALE)
        self.most = 1.05 * max(size for name, line in lines.items() if name != "fp32" for size, _ in line)
        heights = [height for line in lines.values() for _, height in line]
        self.low, self.high = math.floor(min(heights)) - 1, math.ceil(max(heights)) + 1

    def place(self, size: float, height: float) -> tuple[float, float]:
        across = self.left + LEFT + (WIDTH - LEFT - RIGHT) * size / self.most
        up = (HEIGHT - TOP - BOTTOM) * (height - self.low) / (self.high - self.low)
        return SCALE * across, SCALE * (HEIGHT - BOTTOM - up)

    def axes(self, title: str) -> None:
        self.draw.text((SCALE * (self.left + LEFT), SCALE * 10), title, "#222222", self.font)
        for height in range(self.low, self.high + 1, max(1, round((self.high - self.low) / 6))):
            x, y = self.place(0, height)
            self.draw.line([(x, y), self.place(self.most, height)], "#dddddd", SCALE)
            self.draw.text((x - 5 * SCALE, y), f"{height}", "#444444", self.font, anchor="rm")
        for size in range(0, int(self.most) + 1, max(1, round(self.most / 6))):
            x, y = self.place(size, self.low)
            self.draw.text((x, y + 5 * SCALE), f"{size}", "#444444", self.font, anchor="mt")

    def line(self, name: str, points: list[tuple[float, float]], row: int) -> None:
        colour = COLOURS[name]
        if name == "fp32":  # far to the right: its height only
            self.draw.line([self.place(0, points[0][1]), self.place(self.most, points[0][1])], colour, SCALE)
            name = f"fp32, {points[0][0]:.0f} KiB"
        else:
            ends = [self.place(*one) for one in points]
            self.draw.line(ends, colour, 2 * SCALE)
            for x, y in ends:
                self.draw.ellipse([x - 3 * SCALE, y - 3 * SCALE, x + 3 * SCALE, y + 3 * SCALE], colour)
        corner = SCALE * (self.left + WIDTH - 100), SCALE * (HEIGHT - BOTTOM - 70 + 15 * row)
        self.draw.text(corner, name, colour, self.font)


def draw(file: Path, found: dict[str, Lines]) -> None:
    """Writes `file`, a PNG. Raises ValueError where no data set has a line."""
    shown = {name: lines for name, lines in found.items() if max(map(len, lines.values())) > 1}
    if not shown:
        raise ValueError("no curves are kept: run with --only cora-curve --keep FOLDER first")
    image = Image.new("RGB", (SCALE * WIDTH * len(shown), SCALE * HEIGHT), "white")
    for at, (name, lines) in enumerate(shown.items()):
        panel = Panel(ImageDraw.Draw(image), at, lines)
        panel.axes(f"{name}: accuracy (%) against KiB of the hidden features")
        for row, (policy, line) in enumerate(lines.items()):
            panel.line(policy, line, row)
    image.save(file)
