"""Peak resident memory and time per step of masked LM with the loss inside ONNX Runtime, each case in a fresh process.

    python benchmarks/ort_module_with_loss.py
    python benchmarks/ort_module_with_loss.py --cases ort "ort, loss inside" --density 0.3

A step is forward and backward of a RoBERTa of 6 layers and 512 hidden units over a vocabulary of 30,000, dropout 0.1,
with labels for 15% of the tokens. `all rows` returns only the loss, but computes it from all tokens. `smoothed` is
label smoothing, computed from the returned logits as Trainer does, or inside ONNX Runtime if the case is named so. The
peak is the exact resident peak over the steps after the first, which builds the graph.
"""

import argparse
import json
import subprocess
import sys
import time

from tabulate import tabulate

VOCABULARY = 30_000
CASES = {
    "torch": None,
    "ort": {},
    "ort, loss inside": {"ort_module_with_loss": True},
    "ort, loss inside, all rows": {"ort_module_with_loss": True, "ort_label_sparse_optimizer": False},
    "ort, level 1": {"memory_opt_level": 1},
    "ort, level 1, loss inside": {"memory_opt_level": 1, "ort_module_with_loss": True},
    "torch, smoothed": None,
    "ort, smoothed": {},
    "ort, smoothed, loss inside": {"ort_module_with_loss": True},
}


def measure(arguments: argparse.Namespace) -> dict:
    """Run one case in this process; returns its peak in MiB and its CPU seconds per step."""
    import torch
    import transformers
    from transformers.trainer_pt_utils import LabelSmoother

    import optimum_memopt
    from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing
    from optimum_memopt.memory import process
    from optimum_memopt.memory.peak_monitor import PeakMonitor
    from optimum_memopt.sizes import MIB

    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        intermediate_size=2048,
        max_position_embeddings=514,
    )
    model = transformers.RobertaForMaskedLM(config).train()
    ids = torch.randint(5, VOCABULARY, (arguments.batch_size, arguments.seq_len))
    labels = ids.where(torch.rand(ids.shape) < arguments.density, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    smoother = LabelSmoother(epsilon=0.1) if "smoothed" in arguments.case else None
    options = CASES[arguments.case]
    inside = bool(options and options.get("ort_module_with_loss"))
    if options is None:
        process.return_freed_memory()
    else:
        engine = optimum_memopt.optimize(model, ort_fallback=False, memory_opt_log_level="warning", **options)
        if inside and smoother is not None:
            engine.smooth_labels(LabelSmoothing(smoother, shift_labels=False))

    def step() -> None:
        in_model = smoother is None or inside
        loss = model(**batch, labels=labels).loss if in_model else smoother(model(**batch), labels)
        loss.backward()
        model.zero_grad()

    step()
    monitor = PeakMonitor("cpu")
    monitor.start_run()
    begin = time.process_time()
    for _ in range(arguments.steps):
        step()
    return {
        "case": arguments.case,
        "peak": monitor.run_peak,
        "seconds": (time.process_time() - begin) / arguments.steps,
        "logits": ids.numel() * VOCABULARY * 4 / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--density", type=float, default=0.15)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments)))
        return
    found = []
    for case in arguments.cases:
        command = [sys.executable, __file__, "--case", case]
        command += [f"--{name}={getattr(arguments, name)}" for name in ("batch_size", "seq_len", "density", "steps")]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(run.stdout.splitlines()[-1]))
        print(f"{case}: {found[-1]['peak']:.0f} MiB, {found[-1]['seconds']:.1f} s", file=sys.stderr)
    print(f"all logits of a step: {found[0]['logits']:.0f} MiB")
    rows = [(result["case"], f"{result['peak']:.0f}", f"{result['seconds']:.1f}") for result in found]
    print(tabulate(rows, headers=("case", "peak MiB", "CPU-s/step"), tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
