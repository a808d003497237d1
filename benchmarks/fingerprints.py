"""Shows that a change of the package altered no number: plans, predicted bytes, losses and gradients.

    export OMP_NUM_THREADS=1
    PYTHONPATH=BEFORE python benchmarks/fingerprints.py record before.json
    PYTHONPATH=AFTER python benchmarks/fingerprints.py record after.json
    python benchmarks/fingerprints.py compare before.json after.json

Five tiny models run under six plans with both compilers: each case is planned without running it, and trained for a
step. For four models whose forward has several graphs, the predicted peak is compared with torch's allocator. The
script uses only public names of the package, so that one copy runs with versions whose modules differ. Cases already
in a file are not recorded again, except for errors.

Sources of variation between runs are fixed:
- Measured operator costs, which a budget's plan depends on, are cached, and both runs share the cache (`--costs`). A
  case that adds to the cache is recorded again. Plans for a T4 use the costs of a roofline model.
- The process always holds `PROCESS` bytes: the memory that the kernel and psutil report for it is replaced.
- There is one thread, and seeds are set.

Remarks (lines above a table, notes, errors) count as equal if their numbers are; their words may change.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from allocations import allocated

import optimum_memopt

# Large enough that every operator is measured whole, within the headroom that an engine leaves for such a process.
PROCESS = 8 * 2**30
ROWS, LENGTH, WIDTH = 4, 48, 64
COMPILERS = ("aot_eager", "inductor")
# "budget" comes first, since it measures all operators; a curve of budgets measures no large ones and reads the cache.
PLANS = ("budget", "no plan", "config", "level 1", "budget with offload", "chunked loss")
# Share of the activations that does not fit into the budget, 0.4 by default; DeBERTa's are cheap to recompute.
SHARES = {"DebertaV2": 0.6}
MODELS = ("Roberta", "DebertaV2", "GPT2", "T5", "Llama")
SEVERAL_GRAPHS = ("Yoso", "LED", "Wav2Vec2", "Hubert")
TASKS = {"GPT2": "text-generation", "T5": "text2text-generation", "Llama": "text-generation"}
HEADS = {"GPT2": "LMHeadModel", "Llama": "ForCausalLM", "Wav2Vec2": "ForCTC", "Hubert": "ForCTC"}
HEADS |= dict.fromkeys(("T5", "LED"), "ForConditionalGeneration")
# Plans for this machine, which depend on measured costs.
_MEASURED = ("no plan", "budget")
# Fields whose text is compared by its numbers only.
_REMARKS = ("header", "note", "why", "error")
_TEXT = {"vocab_size": 2048, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
_SPEECH = {
    **{**_LAYERS, "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_feat_extract_layers": 3},
    **{"conv_dim": (32, 32, 32), "conv_kernel": (10, 8, 4), "conv_stride": (5, 4, 4), "apply_spec_augment": False},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0},
}


def config(name: str, width: int = WIDTH) -> transformers.PretrainedConfig:
    bert = {**_TEXT, **_LAYERS, "hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 130}
    t5 = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_layers": 2, "num_heads": 4}
    led = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    led |= {"d_model": width, "encoder_ffn_dim": 2 * width, "decoder_ffn_dim": 2 * width, "attention_window": 16}
    arguments: dict[str, Any] = {
        "Roberta": bert,
        "DebertaV2": {**bert, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
        "GPT2": {**_TEXT, "n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 130, "use_cache": False},
        "T5": {**_TEXT, **t5, "decoder_start_token_id": 1, "use_cache": False},
        "Llama": {**bert, "num_key_value_heads": 2, "attention_dropout": 0.1, "use_cache": False},
        "Yoso": {**bert, "use_expectation": True, "hash_code_len": 4},
        "LED": {**_TEXT, **led, "decoder_start_token_id": 2, "use_cache": False},
        **dict.fromkeys(("Wav2Vec2", "Hubert"), _SPEECH),
    }
    return getattr(transformers, f"{name}Config")(**arguments[name])


def model_and_batch(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a reproducible model in training mode and a batch, on the CPU."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}{HEADS.get(name, 'ForMaskedLM')}")(config(name)).train()
    generator = torch.Generator().manual_seed(1)
    if name in ("Wav2Vec2", "Hubert"):
        waves = torch.randn((ROWS, 4000), generator=generator)
        return model, {"input_values": waves, "labels": torch.randint(1, 32, (ROWS, 6), generator=generator)}
    ids = torch.randint(5, _TEXT["vocab_size"], (ROWS, LENGTH), generator=generator)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def fix_process() -> None:
    """Make the kernel and psutil report `PROCESS` bytes for this process."""
    read, info = os.pread, psutil.Process.memory_info
    kib = f"\\1 {PROCESS // 1024} kB".encode()
    os.pread = lambda *given: re.sub(rb"(Vm(?:RSS|HWM):)\s*\d+ kB", kib, read(*given))
    psutil.Process.memory_info = lambda process: info(process)._replace(rss=PROCESS)


@functools.lru_cache(16)
def planned(name: str, compiler: str, device: str | None, is_wide: bool = False, **plan: Any) -> Any:
    """Estimate a step on a device, or on this machine if None."""
    width, rows, length = (2048, 64, 128) if is_wide else (WIDTH, ROWS, LENGTH)
    how = {"batch_size": rows, "seq_len": length, "device": device, "compiler": compiler}
    return optimum_memopt.plan(config(name, width), TASKS.get(name, "fill-mask"), **how, **plan)


def of_plan(table: Any, file: Any) -> dict[str, Any]:
    """Returns the content of a table and of a plan file."""
    choice = json.loads(file.to_json())
    solved_for = {name: value for name, value in choice.pop("solved_for").items() if name != "versions"}
    return {**json.loads(table.to_json()), "choice": choice, "solved for": solved_for}


def of_estimate(estimate: Any) -> dict[str, Any]:
    found = {"peak": estimate.peak, "reserved": estimate.reserved, "breakdown": estimate.breakdown}
    return {**found, **of_plan(estimate.table, estimate.plan)}


def trained(name: str, compiler: str, **options: Any) -> dict[str, Any]:
    """Train one step, and return its plan, predicted peak, loss and gradients."""
    torch._dynamo.reset()
    model, batch = model_and_batch(name)
    options = {"memory_opt_engine": "compile", "memory_opt_compiler": compiler, **options}
    engine = optimum_memopt.optimize(model, **options)
    try:
        torch.manual_seed(2)
        loss = model(**batch).loss
        loss.backward()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {
            **of_plan(engine.plans(), engine.plan_file()),
            "predicted peak, MiB": _predicted_peak(engine),
            "loss": loss.item(),
            "gradients": {name: digest(gradient) for name, gradient in gradients.items()},
        }
    finally:
        engine.detach()


def _predicted_peak(engine: Any) -> float | None:
    try:
        return engine.predicted_peak_mib(None)
    except TypeError:
        # Earlier versions have an argument for gradient accumulation.
        return engine.predicted_peak_mib(None, False)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def fingerprint(name: str, plan: str, compiler: str) -> dict[str, Any]:
    """Returns the compared results of one case."""
    at = functools.partial(planned, name, compiler)
    options: dict[str, Any] = {"memory_opt_loss": "plain"}
    if plan == "no plan":
        estimates = {"T4": at("T4"), "here": at(None)}
        curves = {
            device: [[one.budget, one.peak, one.extra_seconds, one.seconds] for one in estimate.curve]
            for device, estimate in estimates.items()
        }
        found = {device: of_estimate(estimate) for device, estimate in estimates.items()}
        return {**found, "curves": curves, "trained": trained(name, compiler, **options)}
    if plan == "config":
        # Graphs for a T4, and graphs with a plain loss, have different rows.
        on_t4, first = (first_row(one.table) for one in (at("T4"), at(None, config="Loss+:1:0")))
        estimate, options["memory_opt_config"] = at("T4", config=on_t4), first
    elif plan == "level 1":
        estimate, options["memory_opt_level"] = at("T4", level=1), 1
    elif plan == "budget":
        curve = at(None).curve
        middle = (curve[0].peak + curve[-1].peak) // 2
        estimate = at(None, budget=text_of(middle))
        model, batch = model_and_batch(name)
        # A model that is only planned takes no memory of the process.
        there = sum(one.nbytes for one in (*model.parameters(), *model.buffers(), *batch.values()))
        options = {"memory_opt_budget": text_of(middle - there), "memory_opt_loss": "chunked"}
    elif plan == "budget with offload":
        # In small models recompute is cheaper than copies to the host.
        largest = at("T4", is_wide=True)
        budget = largest.peak - int(SHARES.get(name, 0.4) * largest.breakdown["activations"])
        estimate = at("T4", is_wide=True, budget=text_of(budget))
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            estimate.save(file.name)
            # Except for attention, operators have the same paths on this machine.
            applied = trained(name, compiler, memory_opt_plan=file.name, memory_opt_strict=False)
        return {"planned": of_estimate(estimate), "trained": applied}
    else:
        estimate, options["memory_opt_loss"] = at("T4", config="Loss+:1:-1", bf16=True), "chunked"
    return {"planned": of_estimate(estimate), "trained": trained(name, compiler, **options)}


def first_row(table: Any) -> str:
    rows = [row.config for row in table.plans]
    return next(config for config in rows if config.endswith(":1:-1") and "Loss+" not in config)


def text_of(size: int) -> str:
    return f"{size / 1024:.3f}KiB"


def several_graphs(name: str, plan: str) -> dict[str, int]:
    """Returns the predicted and the allocator's peak of activations and gradients, in bytes."""
    torch._dynamo.reset()
    model, batch = model_and_batch(name)
    options = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
    engine = optimum_memopt.optimize(model, **options, memory_opt_level=int(plan == "level 1"))
    try:
        # The first step compiles, which takes several times as long under a profiler.
        for _ in range(2):
            model(**batch).loss.backward()
        file = engine.plan_file()
        model.zero_grad(set_to_none=True)
        forward, saved, loss = allocated(lambda: model(**batch).loss)
        backward, _, _ = allocated(loss.backward)
        predicted = file.solved_for["predicted_bytes"]["activations"]
        return {"graphs": len(file.graphs), "predicted": predicted, "allocated": max(forward, saved + backward)}
    finally:
        engine.detach()


def cases(models: list[str], compilers: list[str], plans: list[str]) -> Iterator[tuple[str, ...]]:
    for name in models:
        if name in SEVERAL_GRAPHS:
            yield from ((name, plan) for plan in ("no plan", "level 1"))
        else:
            yield from ((name, plan, compiler) for compiler in compilers for plan in plans)


def record(path: Path, wanted: Iterator[tuple[str, ...]], costs: Path) -> None:
    os.environ["OPTIMUM_MEMOPT_CACHE"] = str(costs)
    torch.set_num_threads(1)
    fix_process()
    print(f"{optimum_memopt.__file__} to {path}")
    saved = json.loads(path.read_text()) if path.exists() else {}
    for case in wanted:
        key = ", ".join(case)
        if "error" not in saved.get(key, {"error": ""}):
            continue
        before, saved[key] = sizes_in(costs), attempted(*case)
        while case[1] in _MEASURED and before != (after := sizes_in(costs)):
            planned.cache_clear()
            before, saved[key] = after, attempted(*case)
        print(f"{key}: {saved[key].get('error', 'recorded')}", flush=True)
        path.write_text(json.dumps(saved, indent=1))


def sizes_in(folder: Path) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((str(path), path.stat().st_size) for path in folder.rglob("operators*.json")))


def attempted(*case: str) -> dict[str, Any]:
    try:
        return fingerprint(*case) if len(case) == 3 else several_graphs(*case)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each value with its path."""
    if isinstance(found, dict | list) and found:
        for name, value in found.items() if isinstance(found, dict) else enumerate(found):
            yield from leaves(value, f"{path}/{name}")
    else:
        yield path, found


def differences(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], bool]:
    """Returns a line for each value that changed, and whether remarks were reworded."""
    first, second = dict(leaves(before)), dict(leaves(after))
    pairs = {path: (first.get(path, "-"), second.get(path, "-")) for path in {**first, **second}}
    other = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
    moved = [f"{path[1:]}: {one} -> {two}" for path, (one, two) in other.items() if not is_reworded(path, one, two)]
    return moved, len(moved) < len(other)


def is_reworded(path: str, *texts: Any) -> bool:
    """True if both texts are remarks with the same numbers."""
    is_remark = not {*_REMARKS}.isdisjoint(path.split("/")) and all(isinstance(text, str) for text in texts)
    numbers = [re.findall(r"\d+(?:[.,]\d+)*", text) for text in texts] if is_remark else [0, 1]
    return numbers[0] == numbers[1]


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print a line for each case, and return 1 if any differs."""
    count, bad = 0, 0
    for case in sorted({*before, *after}):
        if case.startswith(SEVERAL_GRAPHS):
            continue
        found = [saved.get(case, {"error": "not recorded"}) for saved in (before, after)]
        moved, is_reworded = differences(*found)
        errors = {one["error"] for one in found if "error" in one}
        count, bad = count + 1, bad + bool(moved or errors)
        equal = f"equal{', remarks in other words' * is_reworded}"
        print(f"{case}: {'; '.join(errors) or (f'{len(moved)} values moved' if moved else equal)}")
        for line in moved[:8] if not errors else ():
            print(f"    {line}")
    print("\nForwards in several graphs: predicted peak against torch's allocator")
    for case in sorted(case for case in {*before, *after} if case.startswith(SEVERAL_GRAPHS)):
        print(f"{case}: {error_of(before.get(case))} -> {error_of(after.get(case))}")
    print(f"\n{count - bad} of {count} cases equal")
    return int(bool(bad))


def error_of(found: dict[str, Any] | None) -> str:
    if found is None or "error" in found:
        return "not recorded" if found is None else found["error"]
    share = found["predicted"] / found["allocated"] - 1
    return f"{share:+.2%} of {found['allocated']:,} bytes in {found['graphs']} graphs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorded = commands.add_parser("record")
    recorded.add_argument("file", type=Path)
    for name, allowed in (("models", (*MODELS, *SEVERAL_GRAPHS)), ("compilers", COMPILERS), ("plans", PLANS)):
        recorded.add_argument(f"--{name}", nargs="+", choices=allowed, default=list(allowed))
    recorded.add_argument("--costs", type=Path, default=Path(tempfile.gettempdir()) / "fingerprint-costs")
    compared = commands.add_parser("compare")
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(json.loads(given.before.read_text()), json.loads(given.after.read_text()))
    record(given.file, cases(given.models, given.compilers, given.plans), given.costs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
