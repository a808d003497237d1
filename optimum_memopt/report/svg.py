"""Pictures of matplotlib as SVG in a page, whose style sheet decides their colours."""

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from optimum_memopt.engines.step_timeline import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# matplotlib draws with a colour that stands for a variable of the style sheet.
TEXT, MUTED, GRID, PREDICTED, MEASURED, MARK, BACK = (f"#01010{number}" for number in range(1, 8))
OF_CATEGORY = {name: f"#0202{number:02x}" for number, name in enumerate(CATEGORIES)}
# Of lines that have no meaning of their own.
OF_LINE = tuple(OF_CATEGORY[name] for name in ("parameters", "gradients", "saved activations", "temporary"))
_VARIABLES = {
    TEXT: "currentColor",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PREDICTED: "var(--predicted)",
    MEASURED: "var(--measured)",
    MARK: "var(--mark)",
    BACK: "var(--back)",
    **{colour: f"var(--{name.replace(' ', '-')})" for name, colour in OF_CATEGORY.items()},
}
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "text.color": TEXT,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "grid.color": GRID,
    "axes.axisbelow": True,
}


@contextmanager
def figure(name: str, width: float, height: float) -> Iterator["Figure"]:
    """A figure that `svg_of` understands, to be drawn and written within.

    Args:
        name: pictures of one page have different ones.
        width: inches; the page shows as much of them as it is wide.
        height: inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        yield Figure(figsize=(width, height), layout="constrained")


def svg_of(drawn: "Figure", description: str) -> str:
    """A figure as an element of a page.

    Args:
        drawn: by the colours of this module.
        description: for readers that cannot see it.
    """
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :].rstrip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # The page's own font; the same names of groups are in every picture; a tenth of a point is enough for a path.
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text)
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size[0]} role="img">'
    return f"{head}<title>{html.escape(description)}</title>{text[text.index('>') + 1 :]}"
