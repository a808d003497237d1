"""Predicted speedups of compiled training over plain PyTorch against those published on PyTorch's dashboard.

    python benchmarks/compiled_times.py [--docs docs]

Source: pytorch/pytorch#96191 (March 2023), huggingface suite with amp precision on an A100, forward and backward
without an optimizer, inductor without CUDA graphs. Its models (`benchmarks/dynamo/huggingface.py`) have their default
sizes, 512 tokens or 1,024 (GPT-2), no padding, dropout of 1e-30, and the attention of that time, which materializes
its scores. Nothing is fitted to these figures.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import fill, to_markdown
from transformers import ElectraConfig, GPT2Config, PretrainedConfig, RobertaConfig

from optimum_memopt.engines.compile.predict.micro_batches import of_workload
from optimum_memopt.predict.workload import Workload
from optimum_memopt.sizes import parse_budget
from optimum_memopt.step_settings import StepSpec


@dataclass(frozen=True)
class Published:
    """A row of the dashboard."""

    model: str
    config: PretrainedConfig
    task: str
    rows: int
    tokens: int
    speedup: float


PUBLISHED = (
    Published(
        "RobertaForQuestionAnswering",
        RobertaConfig(vocab_size=50265, max_position_embeddings=514),
        "question-answering",
        16,
        512,
        1.71,
    ),
    Published("GPT2ForSequenceClassification", GPT2Config(pad_token_id=0), "text-classification", 4, 1024, 2.23),
    Published("ElectraForQuestionAnswering", ElectraConfig(), "question-answering", 64, 512, 2.04),
    Published("ElectraForCausalLM", ElectraConfig(is_decoder=True), "text-generation", 32, 512, 1.75),
)


def still(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config with a dropout rate of 1e-30: dropout runs, but drops nothing."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 1e-30)
    return config


def row_of(published: Published) -> dict[str, Any]:
    workload = Workload(
        still(published.config), published.task, published.rows, published.tokens, attention="eager", padding=False
    )
    predictor = of_workload(workload, parse_budget("70GiB"), StepSpec("a100", fp16=True))
    names = ("plain PyTorch", "no plan")
    plans = [next(plan for plan in predictor.plans if plan.name == name and not plan.chunks_loss) for name in names]
    plain, compiled = (sum(predictor.step(plan, published.rows, 1).seconds.values()) for plan in plans)
    return {
        "model": published.model,
        "rows": published.rows,
        "published": published.speedup,
        "predicted": plain / compiled,
        "error": f"{plain / compiled / published.speedup - 1:+.0%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="folder of gpu.md, to fill in its table")
    arguments = parser.parse_args()
    table = to_markdown([row_of(published) for published in PUBLISHED], {"published": 2, "predicted": 2})
    print(table)
    if arguments.docs:
        fill(arguments.docs / "gpu.md", {"compiled-times": table})


if __name__ == "__main__":
    main()
