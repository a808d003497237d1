"""The picture of what budgets cost."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from optimum_memopt.engines.estimates import CurvePoint, Frontier
from optimum_memopt.errors import MemOptError, path_excerpt
from optimum_memopt.report.charts import draw_frontier

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
    draw_frontier(figure.subplots(), Frontier(tuple(points), costs))
    try:
        figure.savefig(path)
    except OSError as error:
        raise MemOptError(f"--budget_curve {path_excerpt(path)}: not written: {error.strerror}") from error
