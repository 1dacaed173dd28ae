"""Plots of the answers to one question: lines if the figures have an axis, otherwise bars. They
need matplotlib (extra `bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import Document
from zmqdist.observe.bench import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "#1f6fb4"
OTHERS = "#9aa5b1"
WIDTH_IN = 7.0
COLORS = 10
"""Number of colours after which matplotlib uses the first colour again."""


def draw(found: Document, path: Path) -> None:
    """Write the plots of a document to a PNG file.

    Raises:
      ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = _panels(found)
    columns = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // columns)
    height = (
        max(2.6, 0.34 * max(len(figures) for _, figures in panels) + 1.2)
        if not _has_axis(panels[0])
        else 3.6
    )
    figure, axes = plt.subplots(
        rows, columns, figsize=(WIDTH_IN * columns, height * rows), squeeze=False
    )
    for ax, panel in zip(axes.flat, panels, strict=False):
        (_lines if _has_axis(panel) else _bars)(ax, panel[1], panel[0], found["curve"])
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    figure.suptitle(f"{found['title']}\n{found['machine']}, {found['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panels(found: Document) -> list[tuple[str, list[Document]]]:
    """Return (title, figures) of each panel of the plot. All figures of a panel have the same
    unit.
    """
    if found["curve"]:
        return [(found["figures"][0]["unit"], found["figures"])]
    groups: dict[tuple[str, str], list[Document]] = {}
    for figure in found["figures"]:
        groups.setdefault(
            (figure["case"] if figure["at"] is not None else "", figure["unit"]), []
        ).append(figure)
    # Leave out panels with a single figure, if there are others, because one bar shows no
    # comparison.
    worth = [group for group in groups.items() if len(group[1]) > 1] or list(groups.items())
    return [(_title(unit, figures), figures) for (_, unit), figures in worth]


def _title(unit: str, figures: list[Document]) -> str:
    """Return the title of a panel: the unit, and before it the case, if all figures have the same
    case."""
    cases = {figure["case"] for figure in figures}
    return ", ".join(filter(None, [*(cases if len(cases) == 1 else []), unit]))


def _has_axis(panel: tuple[str, list[Document]]) -> bool:
    return panel[1][0]["at"] is not None


def _bars(ax: Axes, figures: list[Document], title: str, _curve: str) -> None:
    several = len({figure["case"] for figure in figures}) > 1
    names = [
        f"{figure['system']}, {figure['case']}" if several else figure["system"]
        for figure in figures
    ]
    values = [figure["median"] for figure in figures]
    places = range(len(figures), 0, -1)
    colors = [OURS if figure["system"].startswith("zmqdist") else OTHERS for figure in figures]
    ax.barh(places, values, color=colors)
    ax.set_yticks(places, names, fontsize=8)
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 20 * min(positive):
        ax.set_xscale("log")
    for place, value in zip(places, values, strict=True):
        ax.annotate(f" {shown(value)}", (max(value, 0), place), va="center", fontsize=7)
    ax.set_xlabel(title, fontsize=8)
    ax.tick_params(axis="x", labelsize=7)
    ax.margins(x=0.15)
    _quiet(ax)


def _lines(ax: Axes, figures: list[Document], title: str, curve: str) -> None:
    for number, system in enumerate(dict.fromkeys(figure["system"] for figure in figures)):
        points = sorted(
            (figure["at"], figure["median"]) for figure in figures if figure["system"] == system
        )
        style: dict[str, Any] = {"linewidth": 2.2} if system == "zmqdist" else {"linewidth": 1.2}
        style["linestyle"] = "-" if number < COLORS else "--"
        ax.plot(
            [at for at, _ in points],
            [value for _, value in points],
            marker="o",
            markersize=3,
            label=system,
            **style,
        )
    ax.set_xscale("log")
    values = [figure["median"] for figure in figures]
    if curve:
        ax.set_yscale("log")
        ax.set_xlabel(curve, fontsize=8)
    else:
        ax.set_ylim(0, 1.25 * max(values))
    ax.set_title(title, fontsize=9)
    ax.tick_params(labelsize=7)
    if curve:  # there are many systems, so the legend stands beside the lines
        ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        ax.legend(fontsize=7)
    ax.grid(alpha=0.3)
    _quiet(ax)


def _quiet(ax: Axes) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
