"""A picture of runs: their main series, ranks and attempts, with marks at observations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from distdiag.events.errors import UsageError
from distdiag.findings.finding import Severity
from distdiag.metrics.judging import Judgement
from distdiag.metrics.runs import Run, Track
from distdiag.metrics.series import Floats
from distdiag.metrics.summary import MAIN, rows_of
from distdiag.record.visible import visible
from distdiag.reports.base import cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = (".png", ".svg")
MOST_PANELS: Final = 8
MOST_LINES: Final = 64
"""More lines in one panel cannot be told apart: the first ranks are drawn."""
MOST_POINTS: Final = 4000
"""More points than a screen has columns show nothing more; of each share the extremes are drawn."""
LOGARITHMIC: Final = ("grad_norm", "loss_scale")
COLORS: Final = {Severity.ERROR: "#c0392b", Severity.WARNING: "#d68910", Severity.INFO: "#7f8c8d"}
LONGEST_NAME: Final = 60


def draw(
    runs: tuple[Run, ...], judgement: Judgement, path: Path, names: tuple[str, ...] = ()
) -> None:
    """Write a PNG or an SVG, by the ending of the path. Needs matplotlib.

    Raises:
        UsageError: matplotlib is not installed, the ending is another one, there is nothing to
            draw, or the file cannot be written.

    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a picture ends in {' or '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "a picture needs matplotlib: python -m pip install 'distdiag[metrics]'"
        ) from None
    panels = _panels(runs, names)
    if not panels:
        raise UsageError("there is no series to draw")
    # The same curves give the same file: no date, no random names.
    with rc_context({"svg.hashsalt": "distdiag", "axes.formatter.useoffset": False}):
        figure = Figure(figsize=(10, 2.6 * len(panels) + 0.6), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for panel, (name, tracks) in zip(axes, panels.items(), strict=True):
            _draw_panel(panel, name, tracks, judgement)
        axes[-1].set_xlabel("step")
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        try:
            figure.savefig(path, dpi=120, metadata=metadata)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _panels(runs: tuple[Run, ...], names: tuple[str, ...]) -> dict[str, list[Track]]:
    """Return what is drawn together: the series of one role, or of one name."""
    chosen = {(row.run, row.series) for row in rows_of(runs, names)}
    panels: dict[str, list[Track]] = {}
    for run in runs:
        for track in run.all_tracks():
            if (run.name, track.series.name) in chosen:
                panels.setdefault(track.role or track.series.name, []).append(track)
    order = {role: place for place, role in enumerate(MAIN)}
    kept = sorted(panels, key=lambda name: (order.get(name, len(MAIN)), name))[:MOST_PANELS]
    return {name: panels[name] for name in kept}


def _draw_panel(panel: Axes, name: str, tracks: list[Track], judgement: Judgement) -> None:
    for track in tracks[:MOST_LINES]:
        steps, values = _thinned(track)
        panel.plot(steps, values, linewidth=0.9, label=_label(track))
    panel.set_title(_plain(name), fontsize=9, loc="left")
    panel.grid(visible=True, alpha=0.3)
    if name in LOGARITHMIC and all((t.values > 0).all() for t in tracks):
        panel.set_yscale("log")
    drawn = {(t.run, t.series.name) for t in tracks}
    for seen in judgement.observations:
        if (seen.run, seen.series) in drawn and seen.step is not None:
            panel.axvline(seen.step, color=COLORS[seen.severity], linewidth=0.8, linestyle="--")
            panel.annotate(
                seen.kind.value,
                (seen.step, 1.0),
                xycoords=("data", "axes fraction"),
                fontsize=6,
                color=COLORS[seen.severity],
                rotation=90,
                verticalalignment="top",
            )
    if 1 < len(tracks) <= 10:
        panel.legend(fontsize=6, loc="upper right")


def _label(track: Track) -> str:
    rank = f", {track.ranks.phrase()}" if track.ranks else ""
    attempt = f", attempt {track.curves.attempt}" if track.curves.attempt else ""
    return _plain(f"{track.run}{rank}{attempt}")


def _plain(text: str) -> str:
    r"""Return a text that matplotlib does not take for a formula, nor for one to hide (``_x``)."""
    return " " + cut(visible(text), LONGEST_NAME).replace("$", r"\$")


def _thinned(track: Track) -> tuple[Floats, Floats]:
    if len(track) <= MOST_POINTS:
        return track.steps, track.values
    parts = np.array_split(np.arange(len(track)), MOST_POINTS // 2)
    # The extremes of each share are kept: a spike must not vanish.
    values = track.values
    kept = [
        int(index)
        for part in parts
        for index in sorted({part[np.argmin(values[part])], part[np.argmax(values[part])]})
    ]
    return track.steps[kept], values[kept]
