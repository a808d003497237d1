"""Plots the steps measured on a GPU: time against peak, one panel per model.

python benchmarks/gpu/picture.py benchmarks/gpu/h100.json docs/steps.svg      # needs matplotlib
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

# Works in a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.report import Steps, steps_in
from labels import label
from shared import pyplot

_TITLES = {
    "llama": "Llama-1B with LoRA, 2 x 2,048",
    "roberta": "RoBERTa-large, 12 layers, 16 x 512",
    "deberta": "DeBERTa-v2-xlarge, 6 layers, 16 x 256",
}
# By family and marker: the ways and their names.
_WAYS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("PyTorch", "o"): {"eager": "plain", "ckpt": "checkpointing", "liger": "Liger Kernel"},
    ("torch.compile", "s"): {
        "tc": "torch.compile",
        "tcdyn": "torch.compile",
        "tc_b50": "its budget 0.5",
        "tc_b20": "its budget 0.2",
    },
    ("optimum-memopt", "D"): {
        "none": "no plan",
        "noneplain": "no plan, plain loss",
        "L1": "level 1",
        "B_ckpt": "budget of checkpointing",
    },
}


def draw(steps: Steps, path: Path) -> None:
    """Write the plot as svg."""
    plots = pyplot("steps")
    models = [model for model in _TITLES if any(name.startswith(f"{model} ") for name in steps)]
    figure, panels = plots.subplots(
        1, len(models), figsize=(4.4 * len(models), 3.6), squeeze=False, layout="constrained"
    )
    points = {model: [] for model in models}
    for panel, model in zip(panels[0], models, strict=True):
        for color, ((family, marker), ways) in enumerate(_WAYS.items()):
            found = {name: steps[key] for way, name in ways.items() if (key := f"{model} {way}") in steps}
            places = [(step["allocated"] / 1024, step["wall"] * 1000) for step in found.values()]
            panel.scatter(
                [x for x, _ in places], [y for _, y in places], marker=marker, color=f"C{color}", label=family
            )
            points[model] += zip(found, places, strict=True)
        panel.margins(0.12)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.set_title(_TITLES[model])
        panel.set_xlabel("peak of a step, GiB")
        panel.set_ylabel("time of a step, ms")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_WAYS))
    figure.canvas.draw()
    # Labels are placed for the current layout.
    figure.set_layout_engine("none")
    for panel, model in zip(panels[0], models, strict=True):
        label(panel, points[model])
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path, help="worth.json of gpu/acceptance.py, or rows like those of h100.json")
    parser.add_argument("picture", type=Path)
    asked = parser.parse_args()
    draw(steps_in(asked.steps), asked.picture)
