"""The picture of what budgets cost."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from optimum_memopt.engines.estimates import CurvePoint
from optimum_memopt.errors import MemOptError, path_excerpt

_SUFFIXES = (".svg", ".png")


def check(path: Path) -> None:
    """Refuse a picture that cannot be drawn.

    Raises:
        MemOptError: another kind of file, or matplotlib is missing.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise MemOptError(
            f"--budget_curve {path_excerpt(path)}: allowed are names that end in {' or '.join(_SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise MemOptError("--budget_curve: a picture needs matplotlib: pip install optimum-memopt[report]")


def draw(points: Sequence[CurvePoint], costs: str, path: Path) -> None:
    """Extra time over the peak.

    Args:
        points: from the smallest budget to the largest.
        costs: where the times are from.
        path: of the picture, which `check` has accepted.

    Raises:
        MemOptError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    peaks, times = [point.peak / 2**30 for point in points], [100 * point.extra_time for point in points]
    axes.plot(peaks, times, marker="o", drawstyle="steps-post")
    axes.set_xlabel("predicted peak of a step, GiB")
    axes.set_ylabel(f"extra time of forward and backward, % ({costs})")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except OSError as error:
        raise MemOptError(f"--budget_curve {path_excerpt(path)}: not written: {error.strerror}") from error
