"""How far `--ort_mem_efficient_grad_mgmt` lowers the peak under gradient accumulation, each case in a fresh process.

    python benchmarks/ort_gradients.py
    python benchmarks/ort_gradients.py --accumulate 1

A step is forward and backward of a RoBERTa with dropout 0.1 that classifies one sequence; gradients are reset after
every `accumulate` steps. The peak is the exact resident peak over the steps after the first, which builds the graph.
ORT's torch extensions must be built.
"""

import argparse
import json
import subprocess
import sys
import time

from tabulate import tabulate

MANAGED = {"ort_mem_efficient_grad_mgmt": True}
CASES = {
    "torch": None,
    "none": {},
    "gradient management": MANAGED,
    "level 1": {"memory_opt_level": 1},
    "level 1, gradient management": {"memory_opt_level": 1, **MANAGED},
}


def measure(arguments: argparse.Namespace) -> dict:
    """Run one case in this process; returns its peak in MiB and its CPU seconds per step."""
    import torch
    from transformers import RobertaConfig, RobertaForSequenceClassification

    import optimum_memopt
    from optimum_memopt.memory import process
    from optimum_memopt.memory.peak_monitor import PeakMonitor

    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=8192, num_hidden_layers=arguments.layers, max_position_embeddings=514)
    model = RobertaForSequenceClassification(config).train()
    batch = {"input_ids": torch.randint(5, 8192, (1, arguments.seq_len)), "labels": torch.tensor([1])}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    options = CASES[arguments.case]
    if options is None:
        process.return_freed_memory()
    else:
        optimum_memopt.optimize(model, ort_fallback=False, memory_opt_log_level="warning", **options)
    monitor = PeakMonitor("cpu")
    for step in range(arguments.steps + 1):
        if step == 1:
            monitor.start_run()
            begin = time.process_time()
        model(**batch).loss.backward()
        if step % arguments.accumulate == 0:
            model.zero_grad()
    seconds = (time.process_time() - begin) / arguments.steps
    return {"case": arguments.case, "peak": monitor.run_peak, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "seq_len": 256, "accumulate": 4, "steps": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments)))
        return
    found = []
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, *(f"--{name}={vars(arguments)[name]}" for name in sizes)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(run.stdout.splitlines()[-1]))
    base = next(result for result in found if result["case"] == "none")
    rows = [
        (
            result["case"],
            f"{result['peak']:.0f}",
            f"{result['peak'] / base['peak']:.2f}",
            f"{result['seconds']:.1f}",
            f"{result['seconds'] / base['seconds']:.2f}",
        )
        for result in found
    ]
    columns = ("case", "peak MiB", "of none", "CPU-s/step", "of none")
    print(tabulate(rows, headers=columns, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
