"""Writes the figures of gpu/acceptance.py to files and to the documentation's tables."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from gpu.checks import FAIL, PASS, Outcome
from shared import fill, to_markdown

from optimum_memopt.compat.installed import installed_version

_PACKAGES = ("torch", "triton", "transformers", "accelerate")
# This project's goals against other ways on the same model: name, our ways, other ways (the fastest counts), and the
# largest allowed share of its seconds and of its bytes.
_GOALS = (
    ("no plan of torch.compile", ("none", "noneplain", "none_model"), ("tc", "tcdyn"), 1.0, 1.0),
    ("level 1 of checkpointing", ("L1",), ("ckpt",), 0.75, 0.5),
    ("budget of checkpointing", ("B_ckpt",), ("ckpt",), 0.5, 1.0),
)
# Steps by model and way, such as `llama tc`: seconds and MiB.
Steps = Mapping[str, Mapping[str, float]]


def conditions() -> str:
    """Returns the conditions that the figures depend on besides the models."""
    import torch

    versions = (installed_version((name,)) for name in _PACKAGES)
    found = [" ".join(version) for version in versions if version]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{device}; {', '.join(found)}; Python {platform.python_version()}"


def save(folder: Path, part: str, about: str, found: Sequence[Outcome]) -> None:
    """Write `PART.json` and `PART.md`.

    Args:
        folder: the output folder; created if missing.
        part: name of the part.
        about: the `conditions`.
        found: the part's outcomes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"conditions": about, "outcomes": [asdict(outcome) for outcome in found]}
    (folder / f"{part}.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    (folder / f"{part}.md").write_text(f"{about}\n\n{table(found)}\n", encoding="utf-8")


def steps(found: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Returns the steps among the outcomes, by model and way."""
    return {
        outcome.check: {key: outcome.data[key] for key in ("wall", "allocated")}
        for outcome in found
        if "wall" in outcome.data
    }


def goals(found: Steps, is_quick: bool) -> Iterator[Outcome]:
    """Yields an outcome for each goal and model; skips ways that were not run.

    Args:
        found: the measured steps.
        is_quick: whether the figures are meaningless, so that every goal passes.
    """
    for model in dict.fromkeys(name.split()[0] for name in found):
        for name, ours, theirs, seconds, size in _GOALS:
            own, other = (
                [found[key] for way in ways if (key := f"{model} {way}") in found] for ways in (ours, theirs)
            )
            if not own or not other:
                continue
            best = min(other, key=lambda step: step["wall"])
            for kind, limit in (("wall", seconds), ("allocated", size)):
                share = min(step[kind] for step in own) / best[kind]
                status = PASS if is_quick or share <= limit else FAIL
                yield Outcome(f"{model}, {name}", status, kind, f"{share:.2f}", f"{limit:.2f}")


def steps_in(path: Path) -> Steps:
    """Load the steps from a file of `save`, or from one that has them as `rows`, such as benchmarks/gpu/h100.json."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    if "rows" in raw:
        # Names may end with a version in parentheses; the last version counts.
        return {name.partition(" (")[0]: step for name, step in raw["rows"].items()}
    return steps([Outcome(**outcome) for outcome in raw["outcomes"]])


def compared(found: Steps, earlier: Path) -> str:
    """Returns a table of the steps and those of an earlier run, see `steps_in`."""
    before = steps_in(earlier)
    rows = [
        {
            "step": name,
            "ms before": before[name]["wall"] * 1000,
            "ms": step["wall"] * 1000,
            "MiB before": before[name]["allocated"],
            "MiB": step["allocated"],
        }
        for name, step in found.items()
        if name in before
    ]
    return (
        to_markdown(rows, dict.fromkeys(("ms before", "ms", "MiB before", "MiB"), 1)) if rows else "no step to compare"
    )


def table(found: Sequence[Outcome]) -> str:
    """Returns all outcomes as a Markdown table."""
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
    """Print the tables of a folder, and write them into `gpu.md` of the folder `docs`."""
    for path in sorted(folder.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        print(f"{path.stem}: {text}")
        if docs is not None:
            fill(docs / "gpu.md", {path.stem: text.strip()})
