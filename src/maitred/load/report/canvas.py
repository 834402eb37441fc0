"""Figures as SVG for a page: text stays text, in the page's colours, and ids are unique.

matplotlib writes each SVG as a file of its own. Several of them in one page share ids (so the frame of one figure clips
the lines of another), have black text on a dark page, and use most of their bytes for digits and markers.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import Unavailable
from maitred.load.report.quantity import duration, exact, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"
"""Placeholder for the text colour of the page."""
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#1f83c6",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#8c8c8c",
)
"""Colours after Okabe and Ito (2008), safe for colour-blind eyes; the blue is lighter for dark pages."""
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)

WIDTH_IN = 8.4
NARROW_IN = 4.4
"""Width of a figure for a phone: its text is as large there as that of the others on a wide screen."""
_width_in = ContextVar("_width_in", default=WIDTH_IN)

_STANDALONE = "#777"
"""Text colour of a figure outside of a page; it is readable on white and on black."""

MOST_DOTS = 4_000
"""Most dots of a scatter plot: more are not visible, but make the file larger."""


@contextmanager
def style() -> Iterator[None]:
    """Sets the style of the plots that are drawn within the block.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise Unavailable(
            "Plots and HTML reports need matplotlib, which is not installed. Run: pip install 'maitred[load]'"
        ) from None
    settings: Any = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": "maitred",
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "grid.alpha": 0.13,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "legend.borderaxespad": 0.0,
        "lines.linewidth": 1.5,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "axes.formatter.useoffset": False,
        **dict.fromkeys(
            ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"], INK
        ),
    }
    with mpl.rc_context(settings):
        yield


@contextmanager
def narrow() -> Iterator[None]:
    """Draws the figures of the block for a phone: narrow, with panels below each other."""
    token = _width_in.set(NARROW_IN)
    try:
        yield
    finally:
        _width_in.reset(token)


def draw_narrow(draw: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Returns the figures that `draw` draws, drawn for a phone."""
    with narrow():
        return draw()


def is_narrow() -> bool:
    """Returns whether figures are drawn for a phone."""
    return _width_in.get() < WIDTH_IN


def figure(
    rows: int = 1,
    columns: int = 1,
    *,
    height_in: float = 2.9,
    share_x: bool = False,
    heights: Sequence[float] | None = None,
    widths: Sequence[float] | None = None,
) -> "tuple[Figure, list[Axes]]":
    """Makes an empty figure and its axes, row by row, with relative `heights` and `widths`.

    A narrow figure has one column.
    """
    from matplotlib.figure import Figure

    if is_narrow() and columns > 1:
        rows, columns, height_in, heights, widths = rows * columns, 1, height_in * columns * 0.9, None, None
    drawn = Figure(figsize=(_width_in.get(), height_in), layout="constrained")
    axes = drawn.subplots(rows, columns, squeeze=False, sharex=share_x, height_ratios=heights, width_ratios=widths)
    return drawn, list(axes.flat)


def svg(drawn: "Figure", name: str, label: str) -> str:
    """Renders the figure as an ``<svg>`` element.

    Args:
        drawn: Figure to render.
        name: Name that is unique in the page.
        label: Description of the figure for people who cannot see it.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    # `savefig` would draw everything twice: first without a result, for the layout, which drawing arranges anyway.
    without = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(drawn).print_svg(buffer, metadata=without)  # type: ignore[no-untyped-call]
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = _own_ids(text, f"{name}-narrow" if is_narrow() else name)
    text = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), text)
    # A dot is a line that ends where it began. Its coordinates are written only once.
    text = re.sub(r"M (\S+) (\S+) \nL \1 \2 \n", r"M\1 \2h0", text)
    text = text.replace(INK, "currentColor").replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")
    text = re.sub(r"\n\s*", "\n", text)
    head = f'<svg role="img" aria-label="{escape(label)}" style="color: {_STANDALONE}"'
    return text.replace("<svg", head, 1).strip() + "\n"


def line(axes: "Axes", x: NDArray[Any], y: NDArray[Any], *, colour: str, label: str = "", dashes: object = "-") -> None:
    """Draws a line that breaks where `y` is NaN; a value without neighbours gets a dot, as no line reaches it."""
    there = np.concatenate([[False], np.isfinite(y), [False]])
    alone = np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])
    style: Any = {"linestyle": dashes}
    axes.plot(x, y, color=colour, label=label or None, **style)
    if len(alone):
        axes.plot(x[alone], y[alone], "o", color=colour, markersize=4)


def dots(axes: "Axes", x: NDArray[Any], y: NDArray[Any], colour: str, label: str) -> None:
    """Draws a scatter plot as one path, which takes a tenth of the bytes of separate markers."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    points = np.repeat(np.column_stack([x, y]), 2, axis=0)
    if not len(points):
        return
    path = Path(points, np.tile([Path.MOVETO, Path.LINETO], len(points) // 2))
    path.should_simplify = False
    axes.add_patch(PathPatch(path, fill=False, edgecolor=colour, alpha=0.6, linewidth=3, capstyle="round"))
    axes.plot([], [], "o", color=colour, alpha=0.7, markersize=4, markeredgewidth=0, label=label)
    axes.update_datalim(points)
    axes.autoscale_view()


def seconds_axis(axes: "Axes", which: str = "y", *, logarithmic: bool = False) -> None:
    """Formats an axis of times; ticks look like ``200 ms`` or ``1.5 s``."""
    from matplotlib.ticker import FuncFormatter

    axis = axes.yaxis if which == "y" else axes.xaxis
    if logarithmic:
        log_axis(axes, which)
    axis.set_major_formatter(FuncFormatter(lambda value, _: exact(duration(value)) if value else "0"))


def log_axis(axes: "Axes", which: str) -> None:
    """Makes a logarithmic axis with few round ticks; the more decades, the fewer ticks per decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if which == "y":
        axes.set_yscale("log")
    else:
        axes.set_xscale("log")
    axis = axes.yaxis if which == "y" else axes.xaxis
    low, high = axis.get_view_interval()
    decades = np.log10(high / low) if low > 0 else 0
    axis.set_major_locator(LogLocator(subs=_subdivision(decades), numticks=20))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: exact(significant(value))))


def numbers_axis(axes: "Axes") -> None:
    """Makes an axis of counts or rates from 0; ticks look like ``1,500``."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: exact(significant(value))))


def tick_name(name: str) -> str:
    """Shortens a name to what leaves room for the plot beside it."""
    most = 18 if is_narrow() else 36
    return name if len(name) <= most else f"{name[: most - 1]}…"


def beside(axes: "Axes", x: float, y: float, text: str) -> None:
    """Writes text to the right of a point."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _subdivision(decades: float) -> tuple[int, ...]:
    if decades < 1.2:
        return (1, 2, 5)
    return (1, 3) if decades < 2 else (1,)


def legend(axes: "Axes", *, columns: int = 6) -> None:
    """Places the legend above the plot, right of the title or, in a narrow figure, below it; none if there is none."""
    names = len(axes.get_legend_handles_labels()[0])
    if not names:
        return
    corner: Literal["lower left", "lower right"] = "lower right"
    if is_narrow():
        columns, corner = 3, "lower left"
        axes.set_title(axes.get_title(loc="left"), pad=6 + 13 * -(-names // columns))
    axes.legend(
        loc=corner, bbox_to_anchor=(0 if is_narrow() else 1, 1.01), ncols=columns, handlelength=1.4, columnspacing=1.3
    )


def _own_ids(text: str, name: str) -> str:
    """Removes unused ids, and prefixes the others with the figure's name."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda it: f' id="{name}-{it[1]}"' if it[1] in used else "", text)
    return re.sub(r'(url\(#|href="#)([^)"]+)', rf"\g<1>{name}-\2", text)


def thin(numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Selects at most `MOST_DOTS` of the values, deterministically."""
    if len(numbers) <= MOST_DOTS:
        return numbers
    return np.sort(np.random.default_rng(0).choice(numbers, MOST_DOTS, replace=False))


def fit_seconds(axes: "Axes", values: NDArray[np.float64]) -> None:
    """Makes a time axis from 0, or a logarithmic one if most values would be near 0."""
    known = values[~np.isnan(values) & (values > 0)]
    if len(known) and known.max() > 15 * np.median(known):
        seconds_axis(axes, logarithmic=True)
    else:
        axes.set_ylim(bottom=0)
        seconds_axis(axes)
