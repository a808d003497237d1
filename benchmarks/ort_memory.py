"""Peak resident memory and time a step of the ort engine's plans and levels, each case in a fresh process.

    python benchmarks/ort_memory.py --model roberta
    python benchmarks/ort_memory.py --model deberta-v2 --cases none level1

A step is forward and backward with dropout 0.1; the peak is the exact resident peak over three steps after the first,
which builds the graph. All cases but the untuned ones tell malloc to give freed blocks back. `claimed` is the table's
sum for the plans that are on. Ratios are against the case `none`.
"""

import argparse
import json
import subprocess
import sys
import time

from tabulate import tabulate

CASES = {
    "torch": None,
    "torch checkpointing": None,
    "none": {},
    "Gelu": {"memory_opt_config": "Gelu+:1:-1"},
    "level1": {"memory_opt_level": 1},
    "level2": {"memory_opt_level": 2},
    "ORT's level 1": {"memory_opt_config": "all"},
    "none, arena on": {"ort_arena": True},
    "level1, arena on": {"memory_opt_level": 1, "ort_arena": True},
    "none, malloc untuned": {},
    "level1, malloc untuned": {"memory_opt_level": 1},
    "gradient management": {"ort_mem_efficient_grad_mgmt": True},
    "level1, gradient management": {"memory_opt_level": 1, "ort_mem_efficient_grad_mgmt": True},
}
# Needs the torch extensions, with which the other cases train another graph (embeddings as ATen).
WITH_EXTENSIONS = ("gradient management", "level1, gradient management")


def make_model(name: str, hidden: int, layers: int):
    """A model that classifies sequences (GPT-2: predicts tokens)."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 8192,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 514,
    }
    if name == "roberta":
        return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**shape))
    if name == "deberta-v2":
        config = transformers.DebertaV2Config(
            **shape, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=256, share_att_key=True
        )
        return transformers.DebertaV2ForSequenceClassification(config)
    config = transformers.GPT2Config(
        vocab_size=8192, n_embd=hidden, n_layer=layers, n_head=hidden // 64, n_positions=514
    )
    return transformers.GPT2LMHeadModel(config)


_SIZES = ("hidden", "layers", "batch_size", "seq_len", "accumulate", "steps")


def every_row(model, batch) -> str:
    """The config with every row that ONNX Runtime's own level 1 takes."""
    import optimum_memopt

    engine = optimum_memopt.optimize(model, memory_opt_level=1, memory_opt_log_level="warning")
    model(**batch).loss.backward()
    rows = dict.fromkeys(part for plan in engine.plans().plans for part in plan.config.split(",") if ":1:" in part)
    engine.detach()
    model.zero_grad()
    return ",".join(rows)


def measure(arguments: argparse.Namespace) -> dict:
    """Run one case in this process; MiB and seconds of CPU time a step."""
    import torch

    import optimum_memopt
    from optimum_memopt.engines.ort import allocator
    from optimum_memopt.memory import MIB, PeakMonitor

    model = make_model(arguments.model, arguments.hidden, arguments.layers).train()
    batch = {"input_ids": torch.randint(5, 8192, (arguments.batch_size, arguments.seq_len))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    per_token = arguments.model == "gpt2"
    batch["labels"] = batch["input_ids"].clone() if per_token else torch.randint(0, 2, (arguments.batch_size,))
    options = CASES[arguments.case]
    engine = None
    if arguments.case == "torch checkpointing":
        model.gradient_checkpointing_enable()
    if "untuned" in arguments.case:
        allocator.give_back_freed_memory = lambda: False
    if options is None:
        allocator.give_back_freed_memory()
    else:
        options = dict(options)
        if options.get("memory_opt_config") == "all":
            options["memory_opt_config"] = every_row(model, batch)
        engine = optimum_memopt.optimize(model, ort_fallback=False, memory_opt_log_level="warning", **options)
    monitor = PeakMonitor("cpu")
    for step in range(arguments.steps + 1):
        if step == 1:
            monitor.start_run()
            begin = time.process_time()
        model(**batch).loss.backward()
        if step % arguments.accumulate == 0:
            model.zero_grad()
    seconds = (time.process_time() - begin) / arguments.steps
    claimed = engine.plans().claimed_saving_bytes / MIB if engine else 0.0
    return {"case": arguments.case, "peak": monitor.run_peak, "claimed": claimed, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("roberta", "deberta-v2", "gpt2"), default="roberta")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--accumulate", type=int, default=1, help="Backwards for each time gradients are dropped.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=[case for case in CASES if case not in WITH_EXTENSIONS]
    )
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments)))
        return
    found = []
    for case in arguments.cases:
        command = [sys.executable, __file__, "--case", case, "--model", arguments.model]
        command += [f"--{name}={getattr(arguments, name)}" for name in _SIZES]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(run.stdout.splitlines()[-1]))
        print(f"{case}: {found[-1]['peak']:.0f} MiB", file=sys.stderr)
    base = next((one for one in found if one["case"] == "none"), found[0])
    rows = [
        (one["case"], f"{one['peak']:.0f}", f"{one['peak'] / base['peak']:.2f}", f"{one['claimed']:.0f}")
        + (f"{one['seconds']:.1f}", f"{one['seconds'] / base['seconds']:.2f}")
        for one in found
    ]
    columns = ("case", "peak MiB", "of none", "claimed MiB", "CPU-s a step", "of none")
    print(tabulate(rows, headers=columns, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
