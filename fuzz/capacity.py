"""`kvoracle capacity`: budgets as they are typed, and the model's figures as a table and a chart.

The model itself is `fuzz.verify.capacity`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter, validators
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fuzz.terminal import UsageError
from fuzz.verify.capacity import Capacity, capacities, pool_layout
from reference.geometry import Geometry, ModelShape, RowFormat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**n for n, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", start=1)},
}
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*)")
_RATIO = re.compile(r"[1-9][0-9]{0,5}")

CHART_FORMATS = ("png", "svg")
COLOURS = {"device": "#2f6690", "host": "#e08e45"}
BAR_WIDTH = 0.6
INK, FAINT = "#22303c", "#9aa5b1"


def bytes_of(text: str) -> int:
    """Bytes of a budget as typed: `96GB`, `40GiB`, `1.5 TB`, or a plain number of bytes.

    Raises:
        ValueError: with one sentence.
    """
    amount = _AMOUNT.fullmatch(text.strip())
    unit = UNITS.get(amount[2].lower()) if amount else None
    count = int(Fraction(amount[1]) * unit) if amount and unit else 0
    if count < 1:
        raise ValueError(
            f"{text!r} is no budget: give a positive number of bytes, or one with a unit such as "
            "96GB (powers of 1000) or 40GiB (powers of 1024)."
        )
    return count


def ratio_of(text: str) -> int:
    """A ratio as typed; cyclopts by itself would round 1.5.

    Raises:
        ValueError: with one sentence.
    """
    if not _RATIO.fullmatch(text):
        raise ValueError(f"{text!r} is no ratio: give a whole number from 1 to 999,999.")
    return int(text)


Budget = Annotated[
    int,
    Parameter(allow_leading_hyphen=True, converter=lambda _, tokens: bytes_of(tokens[0].value)),
]
Layers = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=10_000))]
Ratios = Annotated[
    tuple[int, ...],
    Parameter(
        name="--ratio",
        negative="",
        allow_leading_hyphen=True,
        converter=lambda _, tokens: tuple(ratio_of(token.value) for token in tokens),
    ),
]


def check_chart(path: Path | None) -> None:
    """Refuse a chart in a format that is none of CHART_FORMATS."""
    if path is not None and path.suffix.lower().removeprefix(".") not in CHART_FORMATS:
        raise UsageError(
            f"{path} names no format that a chart can have: let it end in .png or .svg."
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for and what fits.

    Fields:
        index_bytes: of one token and layer; a pooled key's bytes over kpool.
        rows: without HiSparse, then at each ratio.
    """

    kpool: int
    logical_page_tokens: int
    dsa_layers: int
    row_format: RowFormat
    row_bytes: int
    index_bytes: float
    device_budget_bytes: int
    host_budget_bytes: int
    rows: tuple[Capacity, ...]


def report(
    geometry: Geometry,
    shape: ModelShape,
    *,
    device_budget: int,
    host_budget: int,
    ratios: Iterable[int],
) -> Report:
    """Ask the model; arguments and errors are those of `capacities`."""
    pool = pool_layout(geometry, shape)
    return Report(
        kpool=geometry.kpool,
        logical_page_tokens=pool.page,
        dsa_layers=pool.dsa_layers,
        row_format=geometry.row_format,
        row_bytes=pool.row_bytes,
        index_bytes=float(pool.index_bytes),
        device_budget_bytes=device_budget,
        host_budget_bytes=host_budget,
        rows=capacities(
            geometry, shape, device_budget=device_budget, host_budget=host_budget, ratios=ratios
        ),
    )


def parts(found: Report) -> Iterator[RenderableType]:
    """The report for a terminal."""
    yield Text(_sizes(found))
    table = Table()
    for column in ("ratio", "device\ntokens", "logical\ntokens", "host bytes\nneeded", "gain"):
        table.add_column(column, justify="right", overflow="fold")
    table.add_column("binds")
    for row in found.rows:
        table.add_row(
            "off" if row.ratio is None else str(row.ratio),
            f"{row.device_tokens:,}",
            f"{row.logical_tokens:,}",
            f"{row.host_bytes_needed:,}",
            "" if row.ratio is None else _percent(row.gain),
            row.binds,
        )
    yield table


def _sizes(found: Report) -> str:
    """The geometry and the budgets, on two lines."""
    return (
        f"kpool {found.kpool}, logical page {found.logical_page_tokens} tokens, "
        f"{found.dsa_layers} DSA layers, {found.row_format} rows of {found.row_bytes} bytes, "
        f"index {found.index_bytes:g} bytes a token\n"
        f"device budget {_gigabytes(found.device_budget_bytes)}, "
        f"host budget {_gigabytes(found.host_budget_bytes)}"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.6g} GB"


def _percent(gain: float) -> str:
    return f"{100 * gain:+,.1f} %"


def chart(found: Report, *, file_format: str) -> bytes:
    """Logical tokens against ratio, as the bytes of a file in one of CHART_FORMATS.

    A bar is as high as the tokens that fit.  Over one that the host budget cuts short, an
    outline shows what the device could index; a line marks the engine without HiSparse.
    """
    # imported here, since no other command should pay for it
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(
        {
            # text stays text in an SVG, and the same figures give the same file
            "svg.fonttype": "none",
            "svg.hashsalt": "kvoracle",
            "font.size": 9,
            "text.color": INK,
            "axes.labelcolor": INK,
            "hatch.color": "white",
        }
    ):
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
        figure = Figure(figsize=(min(max(9, 1 + len(found.rows)), 60), 5.5), layout=layout)
        axes = figure.add_subplot()
        _draw_bars(axes, found.rows)
        _frame(figure, axes, _sizes(found))
        image = BytesIO()
        metadata = {"Date": None} if file_format == "svg" else None
        figure.savefig(image, format=file_format, dpi=160, metadata=metadata)
    return image.getvalue()


def _draw_bars(axes: Axes, rows: Sequence[Capacity]) -> None:
    off, *settings = rows
    for row in settings:
        place, height = str(row.ratio), float(row.logical_tokens)
        (bar,) = axes.bar(
            place,
            height,
            width=BAR_WIDTH,
            color=COLOURS[row.binds],
            hatch="//" if row.binds == "host" else None,
            label=f"{row.binds} budget binds",
        )
        bar.set_gid(f"ratio-{row.ratio}")
        if row.binds == "host":
            axes.bar(
                place,
                row.indexed_tokens - height,
                bottom=height,
                width=BAR_WIDTH,
                color="none",
                edgecolor=FAINT,
                linestyle="--",
                label="what the device could index",
            )
        axes.annotate(
            f"{row.logical_tokens:,}\n{_percent(row.gain)}",
            (place, height),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.axhline(
        float(off.logical_tokens),
        color=INK,
        linewidth=1,
        linestyle=":",
        label=f"HiSparse off: {off.logical_tokens:,}",
    )


def _frame(figure: Figure, axes: Axes, subtitle: str) -> None:
    """Titles, labels with units, and a legend that names each kind of bar once."""
    axes.set_title("Tokens that the KV pool holds", loc="left", pad=42, weight="bold", fontsize=13)
    axes.annotate(
        subtitle, (0, 1), xytext=(0, 12), xycoords="axes fraction", textcoords="offset points"
    )
    axes.set_xlabel("HiSparse ratio (logical tokens a device token)")
    axes.set_ylabel("logical tokens")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.12)
    axes.grid(axis="y", color=FAINT, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    handles, labels = axes.get_legend_handles_labels()
    kinds = dict(zip(labels, handles, strict=True))
    figure.legend(
        kinds.values(), kinds, loc="outside lower center", ncols=len(kinds), frameon=False
    )
