import json
from dataclasses import replace

import pytest
import torch

from optimum_memopt.engines.api.explanations import BACKWARD, Moment, Part, Suggestion
from optimum_memopt.engines.api.predictions import OTHER, PARAMETERS, SAVED, TEMPORARY, Group
from optimum_memopt.errors import is_out_of_memory, shortage
from optimum_memopt.oom.report import MemoryReport

GIB, MIB = 2**30, 2**20
LAYERS = tuple(f"roberta.encoder.layer.{layer}" for layer in range(2))
GELUS = Group(SAVED, "Gelu+:1:-1", 2, 600 * MIB, LAYERS, "intermediate")
REPORT = MemoryReport(
    error="OutOfMemoryError: CUDA out of memory.",
    step=2,
    rank=0,
    model="RobertaForMaskedLM",
    device="cuda",
    engine="plain PyTorch",
    rows=64,
    accumulation=2,
    sizes={"input_ids": "64 x 128"},
    held=2 * GIB,
    requested=48 * MIB,
    moment=Moment(BACKWARD, "roberta.encoder.layer.1", "mm"),
    parts=(
        Part(PARAMETERS, 512 * MIB),
        Part(SAVED, GIB, (GELUS, Group(SAVED, "embedding", 1, 424 * MIB))),
        Part(TEMPORARY, 0),
        Part(OTHER, 460 * MIB),
    ),
    suggestions=(
        Suggestion("--memory_opt_budget 2007MiB", 2000 * MIB, 0.123, "the cheapest recompute"),
        Suggestion("--per_device_train_batch_size 32 --gradient_accumulation_steps 4", GIB, None, "as many rows"),
    ),
    remarks=("several graphs",),
)


def test_the_parts_add_up():
    assert REPORT.accounted == (512 + 1024 + 460) / 2048


def test_one_screen():
    text = REPORT.to_text()
    lines = text.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) < 120
    assert lines[0] == "memory ran out in step 3: 2.00 GiB held, and 48.0 MiB more did not fit"
    assert "backward, at about operator mm in roberta.encoder.layer.1" in text
    assert "Gelu+:1:-1 in roberta.encoder.layer.*.intermediate x 2" in text and "600.0 MiB" in text
    assert text.index("Gelu+") < text.index("embedding")
    assert TEMPORARY not in text
    assert text.index("--memory_opt_budget 2007MiB") < text.index("--per_device")
    assert "predicted peak 1.95 GiB, time +12.3%" in text
    assert text.endswith("note: several graphs")


def test_an_operator_that_the_traceback_names_is_not_about():
    assert str(replace(REPORT.moment, is_exact=True)) == "backward, operator mm in roberta.encoder.layer.1"
    assert str(Moment(BACKWARD)) == "backward"


def test_files(tmp_path):
    paths = REPORT.save(tmp_path / "run")
    assert [path.name for path in paths] == ["memory_report.json", "memory_report.md"]
    found = json.loads(paths[0].read_text())
    assert found == json.loads(json.dumps(REPORT.to_dict()))
    assert found["suggestions"][0]["flags"] == "--memory_opt_budget 2007MiB"
    assert found["sizes"] == {"input_ids": "64 x 128"}
    text = paths[1].read_text()
    assert "| Gelu+:1:-1 | roberta.encoder.layer.*.intermediate x 2 | 2 | 600.0 MiB |" in text
    assert "| `--memory_opt_budget 2007MiB` | 1.95 GiB | +12.3% |" in text


def test_each_rank_has_its_file(tmp_path):
    replace(REPORT, rank=3).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory_report_rank3.json", "memory_report_rank3.md"]
    assert "on rank 3" in replace(REPORT, rank=3).to_text()


def test_nothing_fits():
    report = replace(REPORT, suggestions=())
    assert "none found" in report.to_text() and "None found" in report.to_markdown()


CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 3.25 MiB is "
    "free. Including non-PyTorch memory, this process has 79.14 GiB memory in use. Of the allocated memory 77.50 GiB "
    "is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1048576000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 8.00 GiB for an array"),
        torch.OutOfMemoryError(CUDA),
        RuntimeError(CPU),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_memory_ran_out(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyboardInterrupt()],
)
def test_another_error(error):
    assert not is_out_of_memory(error)


def test_the_allocators_own_error_is_recognised():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert shortage(caught.value) == (2**60, None)


def test_amounts():
    assert shortage(RuntimeError(CUDA)) == (20 * 2**20, int(77.5 * 2**30))
    assert shortage(RuntimeError(CPU)) == (1048576000000, None)
    assert shortage(MemoryError()) == (None, None)
