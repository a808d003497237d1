"""Models, and tables in the documentation's pages, for all benchmarks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

# Model names with their `Workload` task.
MODELS = {"roberta": "text-classification", "deberta-v2": "text-classification", "gpt2": "text-generation"}


def sizes(hidden: int, layers: int) -> dict[str, int]:
    """Returns arguments of a config with heads of 64 units and 8192 tokens, under the names that most models use."""
    return {
        "vocab_size": 8192,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 514,
    }


def make_config(name: str, hidden: int, layers: int) -> Any:
    """Returns the transformers config of a model with heads of 64 units, 8192 tokens and dropout 0.1."""
    import transformers

    if name == "gpt2":
        return transformers.GPT2Config(
            vocab_size=8192, n_embd=hidden, n_layer=layers, n_head=hidden // 64, n_positions=514
        )
    shape = {
        **sizes(hidden, layers),
        # Else the models inspect their labels: stock torch.compile breaks DeBERTa's graph, and compiles RoBERTa twice.
        "problem_type": "single_label_classification",
    }
    if name == "roberta":
        return transformers.RobertaConfig(**shape)
    return transformers.DebertaV2Config(
        **shape, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=256, share_att_key=True
    )


def to_markdown(rows: list[dict[str, Any]], decimals: Mapping[str, int]) -> str:
    """Returns a Markdown table of rows that have the same keys.

    Args:
        rows: values by column.
        decimals: digits after the point, by column; 0 by default.
    """
    shown = [
        {key: value if isinstance(value, str) else f"{value:.{decimals.get(key, 0)}f}" for key, value in row.items()}
        for row in rows
    ]
    return tabulate(shown, headers="keys", tablefmt="github", disable_numparse=True)


def fill(page: Path, sections: Mapping[str, str]) -> None:
    """Write each text between its markers in a page, `<!-- NAME: begin -->` and `<!-- NAME: end -->`; skip names
    without markers."""
    text = page.read_text(encoding="utf-8")
    for name, inside in sections.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{inside}\n\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")


def pyplot(salt: str) -> Any:
    """Returns matplotlib.pyplot, set up for reproducible svg files that keep text as text.

    Args:
        salt: the salt of the ids in the svg file.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9})
    from matplotlib import pyplot

    return pyplot
