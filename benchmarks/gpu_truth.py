"""Predictions for plain PyTorch against figures that others measured on GPUs.

    python benchmarks/gpu_truth.py PATH [PATH …] [--docs docs]

A path is a clone of huggingface/peft or linkedin/Liger-Kernel, or one of their files: results of PEFT's method
comparison (one run, or runs by name with the keys of `PeftRun`), or rows of Liger's benchmarks. Nothing is downloaded.

Liger-Kernel's file has memory and speed rows for PyTorch and for its own kernels; only the PyTorch rows are read.

PEFT publishes neither the length of the longest batch nor the allocated peak, so one length is fitted to all runs for
allocated bytes, and another one for reserved bytes.
"""

import argparse
import contextlib
import csv
import json
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shared import fill, to_markdown
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from optimum_memopt.engines.api.predictions import BATCH, PARAMETERS, EagerSettings
from optimum_memopt.engines.compile.costs.costs import bounded
from optimum_memopt.engines.compile.predict.plain_step import PlainStep, plain_step
from optimum_memopt.engines.simulator.allocator import CachingAllocator
from optimum_memopt.engines.simulator.devices import DEVICES, Device
from optimum_memopt.engines.simulator.events import Event
from optimum_memopt.engines.simulator.recorder import LiveRecorder
from optimum_memopt.engines.simulator.standins import eager_standin
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors
from optimum_memopt.predict.workload import ModuleWorkload
from optimum_memopt.step_settings import StepSpec

GIB, MIB = 2**30, 2**20
BATCH_SIZE = 4
# Longest batch length, in tokens, for which the median error of allocated, and of reserved, bytes is zero.
_ALLOCATED_AT, _RESERVED_AT = 729, 702
# Average tokens of a row with padding, and of a step without padding: 4,198,051 in 5,000 steps.
_TIMED_AT, _REAL_TOKENS = 226, 840
_PEFT = "method_comparison/MetaMathQA/results"
_LIGER = "benchmark/data/all_benchmark_data.csv"
_PLAIN = ("huggingface", "torch")
# Bytes of logits and key-value cache that are alive after a step of PEFT, on average: 0.328 GiB in all runs.
_AFTER_STEP = 0.328 * GIB
# The config of meta-llama/Llama-3.2-3B.
_LLAMA = LlamaConfig(
    hidden_size=3072,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=8192,
    vocab_size=128256,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)


@dataclass(frozen=True)
class PeftRun:
    """A run of PEFT's method comparison.

    Attributes:
        max_reserved: peak reserved bytes of the whole process.
        allocated_after_step: average allocated bytes after a step; 0 if not published.
        peft_config: the adapter's config; None if all parameters are trained.
        autocasts: whether adapters are float32.
        tokens_a_second: training throughput; 0 if not published.
    """

    name: str
    device: str
    max_reserved: int
    allocated_after_step: float
    peft_config: Mapping[str, Any] | None
    autocasts: bool
    tokens_a_second: float = 0


@dataclass(frozen=True)
class LigerRow:
    """A row of Liger's benchmarks for plain PyTorch.

    Attributes:
        sizes: the sizes in the script's config, and the one on the x axis.
        measured: the median of `max_memory_allocated` in MiB, or the median time in milliseconds.
    """

    kernel: str
    mode: str
    sizes: Mapping[str, Any]
    device: str
    measured: float


def peft_runs(path: Path) -> list[PeftRun]:
    """Returns the runs that trained Llama-3.2-3B without autocast, from a results file or from all in a clone."""
    if path.is_dir():
        return [run for file in sorted((path / _PEFT).glob("*.json")) for run in peft_runs(file)]
    found = json.loads(path.read_text(encoding="utf-8"))
    runs = [_published(found)] if "run_info" in found else [_listed(name, run) for name, run in found.items()]
    return [run for run in runs if run is not None]


def _listed(name: str, run: Mapping[str, Any]) -> PeftRun:
    allocated = run.get("allocated_after_step_avg", 0)
    given = run["peft_config"], run.get("autocast_adapter_dtype", True)
    return PeftRun(name, run["device"], run["max_reserved"], allocated, *given, run.get("tokens_per_second", 0))


def _published(found: Mapping[str, Any]) -> PeftRun | None:
    info, trained, how = found["run_info"], found["train_info"], found["run_info"]["train_config"]
    if (
        how["model_id"] != "meta-llama/Llama-3.2-3B"
        or how["use_amp"]
        or how["compile"]
        or how["optimizer_type"] != "AdamW"
        or how["batch_size"] != BATCH_SIZE
        or trained["status"] != "success"
    ):
        return None
    steps = [metric for metric in trained["metrics"] if "train time" in metric]
    seconds = sum(metric["train time"] for metric in steps)
    tokens = next((metric["train total tokens"] for metric in trained["metrics"] if "train total tokens" in metric), 0)
    allocated = [metric["mem allocated avg"] for metric in trained["metrics"] if "mem allocated avg" in metric]
    return PeftRun(
        info["experiment_name"],
        found["meta_info"]["system_info"]["gpu"],
        # The key was `cuda_…` until 2025-07.
        trained.get("accelerator_memory_max") or trained["cuda_memory_max"],
        statistics.mean(allocated) if allocated else 0,
        info["peft_config"],
        how.get("autocast_adapter_dtype", True),
        tokens / seconds if seconds else 0,
    )


def liger_rows(path: Path, metric: str = "memory") -> list[LigerRow]:
    """Returns the rows of a metric (`memory` or `speed`) that `BENCHMARKS` can rebuild."""
    with (path / _LIGER if path.is_dir() else path).open(encoding="utf-8", newline="") as file:
        return [
            LigerRow(
                row["kernel_name"],
                row["kernel_operation_mode"],
                {**json.loads(row["extra_benchmark_config_str"]), row["x_name"]: int(row["x_value"])},
                row["gpu_name"],
                float(row["y_value_50"]),
            )
            for row in csv.DictReader(file)
            if row["kernel_name"] in BENCHMARKS
            and row.get("metric_name", "memory") == metric
            and row.get("kernel_provider", _PLAIN[0]) in _PLAIN
            and row["x_value"].isdecimal()
        ]


def device_named(name: str) -> Device:
    """Returns the device with torch's name for it, such as `NVIDIA A100-SXM4-80GB`."""
    return DEVICES[max((listed for listed in DEVICES if listed in name), key=len)]


def peft_step(run: PeftRun, rows: int, length: int) -> PlainStep:
    """Predict a step of PEFT's loop, which holds the outputs and pads some row."""
    import peft

    with torch.device("meta"), warnings.catch_warnings():
        # PEFT 0.21 uses deprecated names of transformers.
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(_LLAMA, dtype=torch.bfloat16)
        model.tie_weights()
        if run.peft_config is not None:
            given = {name: value for name, value in run.peft_config.items() if value is not None}
            config = peft.PeftConfig.from_peft_type(**given)
            model = peft.get_peft_model(model, config, autocast_adapter_dtype=run.autocasts)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    spec = StepSpec(device_named(run.device).name, optim="adamw_torch")
    return plain_step(ModuleWorkload.of(model, inputs, rows, ()), spec, EagerSettings(keeps_outputs=True))


def reserved(always: Iterable[int], events: Iterable[Event]) -> CachingAllocator:
    """Returns the allocator after one step that began with an empty cache.

    Args:
        always: bytes of the blocks that are allocated before the step.
        events: allocations and frees of the step.
    """
    allocator = CachingAllocator()
    for size in always:
        allocator.allocate(size)
    allocator.run(events)
    return allocator


def peft_row(run: PeftRun) -> dict[str, Any]:
    """Returns a row of the table: measured values, and the errors of the predictions."""
    step = peft_step(run, BATCH_SIZE, _ALLOCATED_AT)
    resident = sum(storage.bytes for storage in step.run.split()[0] if storage.category == PARAMETERS)
    after = step.constant + resident + sum(step.states) * 3 // 2 + _AFTER_STEP
    return {
        "run": run.name.replace("llama-3.2-3B-", ""),
        "measured, GiB": run.max_reserved / GIB,
        "peak": _filled(step).most_allocated / run.max_reserved - 1,
        "reserved": _filled(peft_step(run, BATCH_SIZE, _RESERVED_AT)).reserved / run.max_reserved - 1,
        "after the step": after / run.allocated_after_step - 1 if run.allocated_after_step else None,
        "tokens/s": run.tokens_a_second,
        "speed": tokens_a_second(run) / run.tokens_a_second - 1 if run.tokens_a_second else None,
    }


def tokens_a_second(run: PeftRun) -> float:
    """Predict the throughput for steps of the mean length, without waiting times."""
    step = peft_step(run, BATCH_SIZE, _TIMED_AT)
    assert step.seconds is not None
    return _REAL_TOKENS / step.seconds


def _filled(step: PlainStep) -> CachingAllocator:
    given, events = step.run.split()
    return reserved([step.constant, *(storage.bytes for storage in given), *step.states], events)


class _Norm(nn.Module):
    """The computation of `LlamaRMSNorm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.eps)
        return self.weight * hidden.to(dtype)


class _HeadWithLoss(nn.Module):
    """An output layer and its cross-entropy loss."""

    def __init__(self, hidden: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits, target)


class _Divergence(nn.Module):
    """Jensen-Shannon divergence of a student and a teacher; Python holds each variable until its function returns."""

    def __init__(self, hidden: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.student = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        self.teacher = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)

    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        student_logits, teacher_logits = self.student(student), self.teacher(teacher)
        log_q = torch.log_softmax(student_logits / 1.0, dim=-1)
        log_p = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return self._divergence(log_q, log_p)

    def _divergence(self, log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        dtype = log_q.dtype
        log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
        mean = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
        kl = nn.KLDivLoss(reduction="none", log_target=True)
        loss = 0.5 * kl(torch.log(mean), log_p).sum(dim=-1) + 0.5 * kl(torch.log(mean), log_q).sum(dim=-1)
        return (loss / log_q.shape[0]).sum().to(dtype)


# A module, its inputs, and other tensors that stay allocated.
_Built = tuple[nn.Module, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def _dtype(sizes: Mapping[str, Any]) -> torch.dtype:
    return getattr(torch, str(sizes.get("dtype", "torch.float32")).removeprefix("torch."))


def _norm(sizes: Mapping[str, Any]) -> _Built:
    hidden = torch.empty(sizes["M"], sizes["H"], dtype=_dtype(sizes), requires_grad=True)
    return _Norm(sizes["H"], sizes["eps"]), (hidden,), (torch.empty_like(hidden),)


def _cross_entropy(sizes: Mapping[str, Any]) -> _Built:
    tokens = sizes["B"] * sizes["T"]
    logits = torch.empty(tokens, sizes["V"], requires_grad=True)
    return nn.CrossEntropyLoss(), (logits, torch.empty(tokens, dtype=torch.int64)), ()


def _mlp(sizes: Mapping[str, Any]) -> _Built:
    config = LlamaConfig(**{name: sizes[name] for name in ("hidden_size", "intermediate_size", "hidden_act")})
    shape = sizes.get("bsz", sizes.get("B")), sizes["T"], sizes["hidden_size"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(sizes))
    try:
        return LlamaMLP(config), (torch.empty(shape, requires_grad=True),), ()
    finally:
        torch.set_default_dtype(before)


def _head(sizes: Mapping[str, Any]) -> _Built:
    hidden = torch.empty(sizes["BT"], sizes["H"], dtype=_dtype(sizes), requires_grad=True)
    target = torch.empty(sizes["BT"], dtype=torch.int64)
    # The script builds the heads of both providers.
    other = torch.empty(sizes["V"], sizes["H"], dtype=_dtype(sizes))
    return _HeadWithLoss(sizes["H"], sizes["V"], _dtype(sizes)), (hidden, target), (other,)


def _divergence(sizes: Mapping[str, Any]) -> _Built:
    student = torch.empty(sizes["BT"], sizes["H"], dtype=_dtype(sizes), requires_grad=True)
    return _Divergence(sizes["H"], sizes["V"], _dtype(sizes)), (student, torch.empty_like(student).detach()), ()


# Based on `benchmark/scripts/benchmark_<kernel>.py` of linkedin/Liger-Kernel.
BENCHMARKS: dict[str, Callable[[Mapping[str, Any]], _Built]] = {
    "rms_norm": _norm,
    "cross_entropy": _cross_entropy,
    "swiglu": _mlp,
    "geglu": _mlp,
    "tiled_swiglu": _mlp,
    "tiled_geglu": _mlp,
    "fused_linear_cross_entropy": _head,
    "fused_linear_jsd": _divergence,
}


@contextlib.contextmanager
def _recorded(row: LigerRow, device: Device) -> Iterator[tuple[LiveRecorder, _Built]]:
    """Run the row's module on fake tensors, and record it."""
    with eager_standin(device), dynamo.fake_tensors():
        built = BENCHMARKS[row.kernel](row.sizes)
        recorder = LiveRecorder(built[0], device.cuda)
        with fake_tensors.run_as_eager(), recorder:
            yield recorder, built


def liger_peak(row: LigerRow) -> int:
    """Returns the bytes of the allocator's blocks at the peak of the second iteration."""
    device = device_named(row.device)
    with _recorded(row, device) as (recorder, (module, inputs, beside)):
        recorder.hold(PARAMETERS, dict(module.named_parameters()))
        recorder.hold(BATCH, {f"input {at}": tensor for at, tensor in enumerate((*inputs, *beside))})
        _iterations(row.mode, module, inputs, beside)
    events = recorder.run().events
    # A script runs all modes in one process, so the forward's and the backward's thread each have a cuBLAS workspace.
    workspaces = [device.libraries] * any(event.kind in ("mm", "addmm") for event in events)
    return reserved(workspaces, events).most_allocated


def _iterations(mode: str, module: nn.Module, inputs: Sequence[torch.Tensor], beside: Sequence[torch.Tensor]) -> None:
    if mode == "backward":
        output = module(*inputs)
        gradient = torch.randn_like(output)
        for _ in range(2):
            output.backward(gradient, retain_graph=True)
        return
    for _ in range(2):
        output = module(*inputs)
        if mode == "full":
            gradient = None if not output.dim() else beside[0] if beside else torch.randn_like(output)
            output.backward(gradient, retain_graph=output.dim() > 0)
            del gradient
        del output


def liger_seconds(row: LigerRow) -> float:
    """Predict the seconds of one iteration that allocates its gradients."""
    device = device_named(row.device)
    with _recorded(row, device) as (recorder, (module, inputs, beside)):
        recorder.records_work = row.mode != "backward"
        output = module(*inputs)
        recorder.records_work = False
        gradient = None if not output.dim() else beside[0] if beside else torch.empty_like(output)
        recorder.records_work = row.mode != "forward"
        output.backward(gradient)
    return sum(bounded(work, device)[0] for work in recorder.run().calls)


def liger_times(rows: Sequence[LigerRow]) -> str:
    """Returns a table of the errors of predicted times, by GPU and benchmark."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        name = row.device.removeprefix("NVIDIA "), f"{row.kernel}, {row.mode}"
        errors.setdefault(name, []).append(1000 * liger_seconds(row) / row.measured - 1)
    shown = [
        {
            "GPU": gpu,
            "benchmark": name,
            "figures": len(found),
            "median error": f"{statistics.median(found):+.1%}",
            "from": f"{min(found):+.1%}",
            "to": f"{max(found):+.1%}",
        }
        for (gpu, name), found in errors.items()
    ]
    lines = [
        summary(gpu, [error for (of, _), found in errors.items() if of == gpu for error in found])
        for gpu in dict.fromkeys(gpu for gpu, _ in errors)
    ]
    return "\n".join((to_markdown(shown, {}), "", *lines))


def liger_row(row: LigerRow) -> dict[str, Any]:
    """Returns a row of the table: the measured peak, and the error of the predicted one."""
    sizes = ", ".join(f"{name} {value}" for name, value in row.sizes.items() if isinstance(value, int))
    return {
        "benchmark": f"{row.kernel}, {row.mode}",
        "sizes": sizes,
        "GPU": row.device.removeprefix("NVIDIA "),
        "measured, MiB": row.measured,
        "peak": liger_peak(row) / MIB / row.measured - 1,
    }


def summary(name: str, errors: Sequence[float]) -> str:
    """Returns a sentence with the median, the lowest and the highest error."""
    median = statistics.median(map(abs, errors))
    return f"{name}: {len(errors)} figures, median error {median:.2%}, from {min(errors):+.2%} to {max(errors):+.2%}."


def order(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line with the rank correlation (Spearman) of measured and predicted speeds."""
    timed = [(row["tokens/s"], row["tokens/s"] * (1 + row["speed"])) for row in rows if row["speed"] is not None]
    ranks = [[sorted(column).index(figure) for figure in column] for column in zip(*timed, strict=True)]
    return f"Rank correlation (Spearman) of speeds: {statistics.correlation(*ranks):.2f}."


def table(rows: Sequence[Mapping[str, Any]], errors: Sequence[str], digits: int) -> str:
    """Returns a table of the rows with errors as percentages, and a summary line for each error column."""
    shown = [
        {**row, **{name: "" if row[name] is None else f"{row[name]:+.{digits}%}" for name in errors}} for row in rows
    ]
    text = to_markdown(shown, {"measured, GiB": 2, "measured, MiB": 2})
    lines = [summary(name, [row[name] for row in rows if row[name] is not None]) for name in errors]
    return "\n".join([text, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--docs", type=Path, help="folder of gpu.md, to fill in its tables")
    args = parser.parse_args()
    sections = {}
    for path in args.paths:
        if path.suffix == ".csv" or (path / _LIGER).is_file():
            sections["truth-liger"] = table([liger_row(row) for row in liger_rows(path)], ["peak"], 2)
            if timed := liger_rows(path, "speed"):
                sections["truth-liger-times"] = liger_times(timed)
        else:
            rows = [peft_row(run) for run in peft_runs(path)]
            sections["truth-peft"] = table(rows, ["peak", "reserved", "after the step", "speed"], 1)
            if sum(row["speed"] is not None for row in rows) > 1:
                sections["truth-peft"] += "\n" + order(rows)
    print("\n\n".join(sections.values()))
    if args.docs is not None:
        fill(args.docs / "gpu.md", sections)


if __name__ == "__main__":
    main()
