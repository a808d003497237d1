"""benchmarks/gpu_truth.py: its readers, and predictions that a few lines of arithmetic can verify."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from gpu_truth import (
    BENCHMARKS,
    GIB,
    MIB,
    LigerRow,
    PeftRun,
    device_named,
    liger_peak,
    liger_rows,
    liger_seconds,
    liger_times,
    order,
    peft_runs,
    reserved,
    table,
)

from optimum_memopt.engines.simulator.devices import DEVICES
from optimum_memopt.engines.simulator.events import Event, Storage

MODES = ["forward", "backward", "full"]
LORA = {"peft_type": "LORA", "r": 8}


def published(**changed: Any) -> dict[str, Any]:
    """Returns the contents of a PEFT results file."""
    how = {
        "model_id": "meta-llama/Llama-3.2-3B",
        "batch_size": 4,
        "optimizer_type": "AdamW",
        "use_amp": False,
        "compile": False,
        "autocast_adapter_dtype": False,
    }
    return {
        "run_info": {"experiment_name": "lora/r8", "train_config": {**how, **changed}, "peft_config": LORA},
        "train_info": {
            "accelerator_memory_max": 3 * GIB,
            "status": "success",
            "metrics": [
                {"mem allocated avg": 100.0, "train time": 2.0},
                {"mem allocated avg": 300.0, "train time": 3.0, "train total tokens": 1000},
                {"test accuracy": 0.5},
            ],
        },
        "meta_info": {"system_info": {"gpu": "NVIDIA L40S"}},
    }


def test_both_forms_of_peft_runs(tmp_path: Path) -> None:
    expected = PeftRun("lora/r8", "NVIDIA L40S", 3 * GIB, 200, LORA, False, 200)
    results = tmp_path / "method_comparison/MetaMathQA/results"
    results.mkdir(parents=True)
    (results / "lora--r8.json").write_text(json.dumps(published()))
    (results / "amp.json").write_text(json.dumps(published(use_amp=True)))
    assert peft_runs(tmp_path) == [expected]
    listed = tmp_path / "runs.json"
    run = {"device": "NVIDIA L40S", "max_reserved": 3 * GIB, "peft_config": LORA, "autocast_adapter_dtype": False}
    listed.write_text(json.dumps({"lora/r8": {**run, "allocated_after_step_avg": 200, "tokens_per_second": 200}}))
    assert peft_runs(listed) == [expected]


def test_rows_of_plain_pytorch(tmp_path: Path) -> None:
    row = {
        "kernel_name": "rms_norm",
        "kernel_provider": "huggingface",
        "kernel_operation_mode": "full",
        "metric_name": "memory",
        "x_name": "H",
        "x_value": "1024",
        "y_value_50": "80.0",
        "extra_benchmark_config_str": json.dumps({"M": 2048, "eps": 1e-6, "dtype": "torch.bfloat16"}),
        "gpu_name": "NVIDIA A100-SXM4-80GB",
    }
    others = [{"kernel_provider": "liger"}, {"metric_name": "speed"}, {"kernel_name": "unknown"}, {"x_value": "llama"}]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows([row, *({**row, **other} for other in others)])
    sizes = {"M": 2048, "eps": 1e-6, "dtype": "torch.bfloat16", "H": 1024}
    expected = LigerRow("rms_norm", "full", sizes, "NVIDIA A100-SXM4-80GB", 80)
    assert liger_rows(path) == liger_rows(path, "speed") == [expected]


def test_a_name_of_torch_names_a_device() -> None:
    names = {"NVIDIA A100-SXM4-80GB": "A100", "NVIDIA L40S": "L40S", "NVIDIA GeForce RTX 4090": "RTX 4090"}
    assert {name: device_named(name).name for name in names} == names


def test_cross_entropy_holds_five_sets_of_logits() -> None:
    """The five are logits, their gradient of the previous iteration, log-softmax and two in the backward."""
    row = LigerRow("cross_entropy", "full", {"B": 8, "T": 256, "V": 4096}, "NVIDIA A100-SXM4-80GB", 0)
    assert liger_peak(row) == pytest.approx(5 * 8 * 256 * 4096 * 4, rel=2e-3)


def test_times_are_those_of_products_where_they_are_large() -> None:
    sizes = {
        "bsz": 8,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "hidden_act": "silu",
        "dtype": "torch.bfloat16",
    }
    rows = [LigerRow("swiglu", mode, {**sizes, "T": 1024}, "NVIDIA A100-SXM4-80GB", 1) for mode in MODES]
    forward, backward, full = map(liger_seconds, rows)
    products = 3 * 2 * 8 * 1024 * 4096 * 11008 / DEVICES["A100"].product_rate("bfloat16")
    assert products < forward < 1.2 * products
    assert 2 * products < backward < 2.4 * products
    assert full == pytest.approx(forward + backward)
    assert "A100-SXM4-80GB: 3 figures" in liger_times(rows)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_holds_what_it_runs(mode: str) -> None:
    sizes = {"bsz": 2, "hidden_size": 512, "intermediate_size": 1024, "hidden_act": "silu", "dtype": "torch.bfloat16"}
    row = LigerRow("swiglu", mode, {**sizes, "T": 1024}, "NVIDIA A100-SXM4-80GB", 0)
    weights, hidden, inner = 3 * 512 * 1024 * 2, 2 * 1024 * 512 * 2, 2 * 1024 * 1024 * 2
    workspaces = device_named(row.device).libraries
    # Input and output, and the saved results of the three products and the activation.
    forward = weights + 2 * hidden + 4 * inner + workspaces
    peak = liger_peak(row)
    assert peak == forward if mode == "forward" else peak > forward + weights


def test_reserved_counts_gaps() -> None:
    events = [
        Event("a", allocates=(Storage("a", 24 * MIB), Storage("b", 24 * MIB))),
        Event("b", frees=("a", "b")),
        Event("c", allocates=(Storage("c", 32 * MIB),)),
    ]
    filled = reserved([], events)
    assert (filled.most_allocated, filled.reserved) == (48 * MIB, 80 * MIB)


def test_order_of_speeds() -> None:
    rows = [{"tokens/s": 100, "speed": 0.0}, {"tokens/s": 200, "speed": 0.1}, {"tokens/s": 300, "speed": -0.5}]
    assert order(rows).endswith("0.50.")
    assert order(rows[:2]).endswith("1.00.")


def test_a_table_sums_up_its_errors() -> None:
    text = table([{"run": "a", "peak": 0.01}, {"run": "b", "peak": -0.03}, {"run": "c", "peak": None}], ["peak"], 1)
    assert "+1.0%" in text
    assert "peak: 2 figures, median error 2.00%, from -3.00% to +1.00%." in text
    assert set(BENCHMARKS) >= {"rms_norm", "geglu", "fused_linear_jsd"}
