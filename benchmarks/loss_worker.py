"""A process for one baseline of loss.py: builds the model, then measures one step for each line of standard input."""

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PLAIN = "plain"
_ANY = ("masked", "causal")
# The losses that are compared, and the kinds of models that each supports.
BASELINES = {
    PLAIN: _ANY,
    "eager": _ANY,
    "chunked": _ANY,
    "ort, loss inside": ("masked",),
    "TRL": ("causal",),
    "cut-cross-entropy": _ANY,
}


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        name: the name that --only matches.
        kind: `masked` (RoBERTa) or `causal` (Llama with tied embeddings).
        vocabulary: number of classes.
        hidden: width of the hidden states.
        layers: number of layers.
        batch_size: sequences per batch.
        seq_len: tokens per sequence.
        density: share of the tokens that have a label.
    """

    name: str
    kind: str
    vocabulary: int
    hidden: int
    layers: int
    batch_size: int
    seq_len: int
    density: float = 1.0


def is_chunked_by_auto(case: Case) -> bool:
    """True if `--memory_opt_loss auto` computes the loss in chunks."""
    import torch

    from optimum_memopt.engines.compile.loss.operator import LossShape

    rows, dtype = case.batch_size * case.seq_len, torch.float32
    return bool(LossShape(rows, case.hidden, case.vocabulary, dtype, dtype, dtype).saving > 0)


def versions() -> str:
    from optimum_memopt.compat.installed import installed_version

    names = ("torch", "transformers", "trl", "onnxruntime-training-cpu")
    found = [installed_version((name,)) for name in names]
    return ", ".join([*(" ".join(version) for version in found if version), platform.machine()])


def serve(settings: dict[str, Any]) -> None:
    """Answer each `peak` or `step` on standard input with a line of JSON, until the input ends.

    The first line of output has the reason why the baseline cannot train, or an empty one.
    """
    import torch

    torch.set_num_threads(settings["threads"])
    try:
        step = _prepare(Case(**settings["case"]), settings["baseline"], settings["packages"])
        # The first step compiles and loads libraries.
        step()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}), flush=True)
        return
    print(json.dumps({"error": ""}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"peak": _peak_mib(step)} if line.strip() == "peak" else _timed(step)), flush=True)


def _prepare(case: Case, baseline: str, packages: str | None) -> Callable[[], None]:
    """Returns a function that runs one training step."""
    import torch
    import transformers

    from optimum_memopt import optimize
    from optimum_memopt.memory import process

    torch.manual_seed(0)
    model = _model(case, transformers).train()
    ids = torch.randint(5, case.vocabulary, (case.batch_size, case.seq_len))
    labels = ids.where(torch.rand(ids.shape) < case.density, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    loss_of: Callable[[], torch.Tensor] = lambda: model(**batch).loss  # noqa: E731
    options: dict[str, Any] = {"memory_opt_log_level": "warning"}
    if baseline in (PLAIN, "chunked"):
        engine = optimize(model, memory_opt_engine="compile", memory_opt_loss=baseline, **options)
        engine.outputs_read_by = lambda: ""
    elif baseline.startswith("ort"):
        optimize(model, memory_opt_engine="ort", ort_fallback=False, ort_module_with_loss=True, **options)
    else:
        # The engines configure malloc the same way.
        process.return_freed_memory()
    if baseline == "TRL":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)
        loss_of = lambda: model(**batch, fused_lm_head=True).loss  # noqa: E731
    elif baseline == "cut-cross-entropy":
        sys.path += [packages] if packages else []
        from cut_cross_entropy import linear_cross_entropy

        del batch["labels"]
        is_causal = case.kind == "causal"

        def loss_of() -> torch.Tensor:
            hidden = model.base_model(**batch).last_hidden_state
            if not is_causal:
                head = model.lm_head
                hidden = head.layer_norm(torch.nn.functional.gelu(head.dense(hidden)))
            weight = model.get_output_embeddings().weight
            return linear_cross_entropy(hidden, weight, labels, shift=is_causal, impl="torch_compile")

    def step() -> None:
        loss_of().backward()
        model.zero_grad()

    return step


def _model(case: Case, transformers: Any) -> Any:
    sizes = {
        "vocab_size": case.vocabulary,
        "hidden_size": case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.hidden // 64,
        "intermediate_size": 4 * case.hidden,
    }
    if case.kind == "masked":
        return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**sizes, max_position_embeddings=514))
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=case.seq_len, tie_word_embeddings=True)
    config.use_cache = False
    return transformers.LlamaForCausalLM(config)


def _timed(step: Callable[[], None]) -> dict[str, float]:
    """Measure the CPU seconds of a step, and by how many MiB the process grew."""
    from optimum_memopt.memory.peak_monitor import PeakMonitor

    monitor = PeakMonitor("cpu")
    monitor.start_run()
    held, begin = monitor.run_peak, time.process_time()
    step()
    return {"seconds": time.process_time() - begin, "resident": monitor.run_peak - held}


def _peak_mib(step: Callable[[], None]) -> float:
    """Returns the peak of torch's allocator during a step, over what was allocated before, in MiB."""
    from allocations import allocated

    peak, _, _ = allocated(step)
    return peak / 2**20
