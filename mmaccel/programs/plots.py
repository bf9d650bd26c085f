"""Drawing with matplotlib, in one style."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..core.files import write_whole, writing
from ..errors import MmaccelError

#: colours (Okabe and Ito's, dark ones first), markers and dashes of curves, which also differ in grey
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX*<>"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
#: of a line to compare with
BASELINE: dict[str, Any] = {"color": "black", "linewidth": 1, "linestyle": (0, (1, 2))}
#: the band of its interval, and the bars of the intervals of points
BAND: dict[str, Any] = {"color": "black", "alpha": 0.07, "linewidth": 0}
BARS: dict[str, Any] = {"elinewidth": 0.8, "capsize": 2}


def load_pyplot(extra: str) -> Any:
    """``matplotlib.pyplot`` for pictures in files. Raises MmaccelError, which names an ``extra`` of mmaccel, if matplotlib is
    not installed."""
    try:
        import matplotlib
    except ImportError:
        raise MmaccelError(f"Drawing needs matplotlib; run: pip install 'mmaccel[{extra}]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def curve_style(number: int) -> dict[str, Any]:
    """Options of ``axes.plot`` for a curve, by its number."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "markersize": 5,
        "linewidth": 1.6,
    }


def open_axes(axes: Any, **labels: Any) -> None:
    """Set labels and the like, a pale grid, and no frame at the top and on the right."""
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def image_of(figure: Any, kind: str = "png", dpi: int = 150) -> bytes:
    """A figure as a picture; the figure is closed."""
    from matplotlib import pyplot

    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=dpi, format=kind)
    finally:
        pyplot.close(figure)
    return content.getvalue()


def save(figure: Any, path: Path) -> Path:
    """Write a figure as its suffix says, whole or not at all. Raises MmaccelError if that fails."""
    content = image_of(figure, path.suffix[1:])
    with writing(path, "give another file"):
        write_whole(path, content)
    return path
