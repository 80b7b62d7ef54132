"""Many small numbers in bars, drawn fast.

A picture of 16 devices and 64 microbatches has thousands of numbers but few different ones; each
different one is a shape that is stamped wherever it is needed (ten times as fast as texts).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS_PER_INCH = 72.0
DIGIT_WIDTH = 0.64
"""Width of a digit as a part of the font size (DejaVu Sans)."""
HEIGHT_PART = 0.62
"""Font size as a part of a bar's height."""
LARGEST, SMALLEST_READABLE = 7.5, 4.4
"""Font sizes in points."""


@dataclass
class Labels:
    """Collects the numbers of a picture whose x unit is ms and whose y unit is the inch."""

    points_per_ms: float
    _places: dict[tuple[str, float, str], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(
        self, text: str, start_ms: float, end_ms: float, top_in: float, height_in: float, ink: str
    ) -> bool:
        """Put a text into the middle of a bar if it is readable there; say whether it is."""
        room_points = (end_ms - start_ms) * self.points_per_ms - 1.0
        by_width = room_points / (len(text) * DIGIT_WIDTH)
        size = min(LARGEST, height_in * POINTS_PER_INCH * HEIGHT_PART, by_width)
        if size < SMALLEST_READABLE:
            return False
        size = int(size * 2) / 2  # few sizes, so that bars of a kind look alike
        if size < SMALLEST_READABLE:
            size = SMALLEST_READABLE
        middle = ((start_ms + end_ms) / 2, top_in + height_in / 2)
        self._places[text, size, ink].append(middle)
        return True

    def draw(self, axes: Axes) -> None:
        """Draw all of them, above what is drawn already."""
        from matplotlib.collections import PathCollection
        from matplotlib.path import Path
        from matplotlib.textpath import TextPath
        from matplotlib.transforms import Affine2D

        figure = axes.get_figure(root=True)
        assert figure is not None
        in_points = Affine2D().scale(1.0 / POINTS_PER_INCH) + figure.dpi_scale_trans
        for (text, size, ink), places in sorted(self._places.items()):
            shape = TextPath((0.0, 0.0), text, size=size)
            box = shape.get_extents()
            centre = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
            stamp = Path(shape.vertices - centre, shape.codes)
            collection = PathCollection(
                [stamp],
                offsets=places,
                offset_transform=axes.transData,
                facecolors=[ink],
                linewidths=0,
                zorder=3,
            )
            collection.set_transform(in_points)
            axes.add_collection(collection, autolim=False)
