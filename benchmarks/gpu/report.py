"""The figures of gpu/acceptance.py as files and as tables of the documentation."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from gpu.checks import FAIL, PASS, Outcome
from shared import fill, to_markdown

from optimum_memopt.compat.installed import installed_version

_PACKAGES = ("torch", "triton", "transformers", "accelerate")
# What this project wants to be, of other ways on the same model: name, ours, theirs of which the best counts, and the
# most of the seconds and of the bytes.
_GOALS = (
    ("no plan of torch.compile", ("none", "noneplain", "none_model"), ("tc", "tcdyn"), 1.0, 1.0),
    ("level 1 of checkpointing", ("L1",), ("ckpt",), 0.75, 0.5),
    ("budget of checkpointing", ("B_ckpt",), ("ckpt",), 0.5, 1.0),
)
# A step by model and way, as `llama tc`: seconds and MiB.
Steps = Mapping[str, Mapping[str, float]]


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


def steps(found: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """The steps among the outcomes, by model and way."""
    return {
        outcome.check: {key: outcome.data[key] for key in ("wall", "allocated")}
        for outcome in found
        if "wall" in outcome.data
    }


def goals(found: Steps, is_quick: bool) -> Iterator[Outcome]:
    """What this project wants to be, by model; nothing of ways that were not run.

    Args:
        is_quick: figures mean nothing.
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
    """The steps of a file of `save`, or of one that has them as `rows`, as benchmarks/gpu/h100.json."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    if "rows" in raw:
        # Versions may stand behind the names; of several the last one counts.
        return {name.partition(" (")[0]: step for name, step in raw["rows"].items()}
    return steps([Outcome(**outcome) for outcome in raw["outcomes"]])


def compared(found: Steps, earlier: Path) -> str:
    """A table of the steps beside those of an earlier run, see `steps_in`."""
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
