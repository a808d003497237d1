"""The figures of gpu/acceptance.py as files and as tables of the documentation."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gpu.checks import Outcome
from shared import fill, to_markdown

from optimum_memopt.compat import installed_version

_PACKAGES = ("torch", "triton", "transformers", "accelerate")


def conditions() -> str:
    """The conditions that the figures depend on beside the models."""
    import torch

    versions = (installed_version((name,)) for name in _PACKAGES)
    found = [" ".join(version) for version in versions if version]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{device}; {', '.join(found)}; Python {platform.python_version()}"


def save(folder: Path, part: str, about: str, found: Sequence[Outcome]) -> None:
    """Write `PART.json` and `PART.md`.

    Args:
        folder: made where it is not there.
        part: their name.
        about: the `conditions`.
        found: the figures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"conditions": about, "outcomes": [asdict(outcome) for outcome in found]}
    (folder / f"{part}.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    (folder / f"{part}.md").write_text(f"{about}\n\n{table(found)}\n", encoding="utf-8")


def table(found: Sequence[Outcome]) -> str:
    """All outcomes in Markdown."""
    rows = [
        {
            "": outcome.status,
            "check": f"{outcome.check}: {outcome.name}" if outcome.name else outcome.check,
            "figure": outcome.figure.replace("|", "\\|"),
            "limit": outcome.limit,
        }
        for outcome in found
    ]
    return to_markdown(rows, {})


def fill_docs(folder: Path, docs: Path | None) -> None:
    """Print the tables of a folder, and write them into `gpu.md` of another one."""
    for path in sorted(folder.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        print(f"{path.stem}: {text}")
        if docs is not None:
            fill(docs / "gpu.md", {path.stem: text.strip()})
