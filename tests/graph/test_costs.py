import json
import os
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import allocated

from optimum_memopt.engines.api.predictions import BANDWIDTH, COMPUTE, LAUNCHES
from optimum_memopt.engines.compile.costs import costs
from optimum_memopt.engines.compile.costs.graph_work import works
from optimum_memopt.engines.compile.costs.times import cache_path, known_costs, replayed
from optimum_memopt.engines.compile.graph.joint import is_view
from optimum_memopt.engines.compile.graph.problem import problems_of
from optimum_memopt.engines.compile.graph.saved_activations import operator_name
from optimum_memopt.engines.compile.loss.operator import loss_shape
from optimum_memopt.engines.simulator.devices import DEVICES, device_of
from optimum_memopt.engines.simulator.work import Kernel, Work, work_of
from optimum_memopt.engines.torch_compat import fx_graph
from optimum_memopt.errors import MemOptError
from tests.captured import Captured, capture


def measured(captured: Captured, known: dict[str, costs.Measured], **limit: float) -> costs.Costs:
    joint, sizes = captured.joint, captured.sizes
    return costs.measured(joint, sizes, works(joint, sizes), False, known, **limit)


def test_a_roofline_has_seconds_for_all_that_runs(roberta: Captured) -> None:
    slow, fast = (costs.roofline(roberta.joint, roberta.sizes, DEVICES[name], False) for name in ("T4", "H100"))
    assert (slow.source, fast.source) == ("roofline T4", "roofline H100")
    for node, on_slow, on_fast in zip(roberta.joint.nodes, slow.seconds, fast.seconds, strict=True):
        # Neither launches kernels faster.
        assert on_slow >= on_fast > 0 or on_slow == on_fast == 0, node
        assert not (is_view(node) and on_slow)
    fused = costs.roofline(roberta.joint, roberta.sizes, DEVICES["T4"], True)
    by_name = {
        operator_name(node): (a, b)
        for node, a, b in zip(roberta.joint.nodes, slow.seconds, fused.seconds, strict=False)
    }
    assert by_name["addmm"][0] == by_name["addmm"][1]
    assert sum(fused.seconds) < sum(slow.seconds)


def test_an_operator_takes_the_longest_of_what_bounds_it() -> None:
    """The time of an operator is the longest of a launch, its products and its operands."""
    device, gib = DEVICES["A100"], 2**30
    moving, computing = gib / (0.75 * 2039e9), 1e12 / (0.85 * 312e12)
    cases = {
        (gib, 0.0): (moving, BANDWIDTH),
        (gib, 1e12): (computing, COMPUTE),
        (16 * gib, 1e12): (16 * moving, BANDWIDTH),
        (64.0, 0.0): (4e-6, LAUNCHES),
        (64.0, 8.0): (4e-6, LAUNCHES),
    }
    for (size, flops), (seconds, bound) in cases.items():
        work = Work("aten.mm.default()", size, flops, "bfloat16")
        assert costs.bounded(work, device) == (pytest.approx(seconds), bound)
    slower = Work("aten.mm.default()", 64.0, 1e12, "float32")
    assert costs.bounded(slower, device)[0] == pytest.approx(computing * 312 / 19.5)
    within = Work("aten.mul.Tensor()", 0.0, 0.0, "float32", is_launched=False)
    assert costs.bounded(within, device)[0] == 0


def work_of_call(operator: Any, *given: Any) -> Work:
    return work_of(operator, given, {}, operator(*given), None)


def test_kinds_of_kernels_have_rates_of_their_own() -> None:
    """Covers rows of no multiple of 16 bytes, mixed dtypes, sums, causal attention, and thin float32 products."""
    aten, device = torch.ops.aten, DEVICES["H100"]

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    hidden, wide, wider = meta(4096, 1024), meta(1024, 50264), meta(1024, 50265)
    aligned, unaligned = work_of_call(aten.mm.default, hidden, wide), work_of_call(aten.mm.default, hidden, wider)
    assert (aligned.kernel, unaligned.kernel) == (Kernel.PRODUCT, Kernel.UNALIGNED)
    slower = costs.bounded(unaligned, device)[0] / costs.bounded(aligned, device)[0]
    assert slower == pytest.approx(1 / device.attained.unaligned, rel=1e-3)
    # The weight's rows are the long dimension, whatever its columns are.
    assert work_of_call(aten.mm.default, hidden, meta(50265, 1024).t()).kernel is Kernel.UNALIGNED
    assert work_of_call(aten.mm.default, wider.t().float(), meta(1024, 8).float()).kernel is Kernel.PRODUCT
    half, single = meta(64, 1024), meta(64, 1024, dtype=torch.float32)
    kinds = {
        Kernel.MOVING: [(aten.add.Tensor, half, half), (aten.mul.Tensor, single, 2.0)],
        Kernel.CONVERTING: [(aten.add.Tensor, half, single)],
        Kernel.REDUCING: [(aten.sum.dim_IntList, half, [0]), (aten._log_softmax.default, half, -1, False)],
    }
    for kind, calls in kinds.items():
        assert [work_of_call(*call).kernel for call in calls] == [kind] * len(calls)
    for dtype, kind in ((torch.float32, Kernel.CONVERTING), (torch.bfloat16, Kernel.MOVING)):
        copied = aten._to_copy.default(half, dtype=dtype)
        assert work_of(aten._to_copy.default, (half,), {"dtype": dtype}, copied, None).kernel is kind
    # Only a few rows of the table are read.
    table, ids = meta(50265, 1024), meta(8, dtype=torch.int64)
    assert work_of_call(aten.embedding.default, table, ids).bytes == 2 * 8 * 1024 * 2 + 8 * 8
    thin = work_of_call(aten.mm.default, meta(4096, 2048, dtype=torch.float32), meta(2048, 16, dtype=torch.float32))
    assert thin.flops == 4 * 2 * 4096 * 2048 * 16
    heads = [meta(2, 4, 128, 64) for _ in range(3)]
    full, causal = (
        work_of_call(aten._scaled_dot_product_flash_attention.default, *heads, 0.0, is_causal)
        for is_causal in (False, True)
    )
    assert full.kernel is Kernel.ATTENTION and full.flops == 2 * causal.flops > 0


def test_a_planned_device_computes_chunks_of_a_loss_in_two_kernels() -> None:
    """Chunks for a planned CUDA device are fused, whether or not the planning machine has Triton."""
    hidden, weight = (torch.empty(size, 64, dtype=torch.bfloat16, device="meta") for size in (512, 1001))
    labels = torch.empty(512, dtype=torch.int64, device="meta")
    tensors = hidden, weight, None, None, None, labels, None
    numbers = 1.0, 0.0, -100, True, 0.0, torch.bfloat16, torch.float32, [True, False, False, False, False]
    on_cpu, on_cuda = (loss_shape((*tensors, *numbers), is_cuda) for is_cuda in (False, True))
    # Padded bfloat16 columns are read twice and written once.
    assert on_cuda.is_fused and on_cuda.moved == 3 * 512 * 1008 * 2 < on_cpu.moved


def test_a_step_waits_for_python_where_kernels_are_short() -> None:
    device = DEVICES["H100"]
    short, long = (Work("aten.mul.Tensor()", size, 0.0, "bfloat16") for size in (1e3, 1e9))
    in_backward = replace(short, by_python=False)
    call = device.attained.call

    def seconds(*calls: Work) -> float:
        return sum(costs.seconds_by_bound(calls, device).values())

    assert seconds(*[short] * 1000) - seconds(*[short] * 500) == pytest.approx(500 * call)
    assert seconds(*[in_backward] * 1000) - seconds(*[in_backward] * 500) == pytest.approx(250 * call)
    # Python runs ahead, and after long kernels short ones take only their device time.
    of_long = costs.bounded(long, device)[0]
    assert seconds(*[long] * 100) - seconds(*[long] * 50) == pytest.approx(50 * of_long)
    by_bound = costs.seconds_by_bound([*[long] * 100, *[short] * 100], device)
    assert by_bound[BANDWIDTH] == pytest.approx(100 * of_long)
    assert by_bound[LAUNCHES] < 100 * call


def test_measuring_draws_no_random_numbers_and_is_remembered(roberta, monkeypatch) -> None:
    before = torch.get_rng_state()
    known: dict[str, costs.Measured] = {}
    first = measured(roberta, known)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.source == "measured" and len(known) > 20 and min(known.values()).seconds > 0
    assert all(
        seconds > 0
        for node, seconds in zip(roberta.joint.nodes, first.seconds, strict=False)
        if operator_name(node) == "gelu"
    )
    monkeypatch.setattr(costs, "_measure", lambda *args: pytest.fail("measured again"))
    again = measured(roberta, known, limit=0)
    assert again == first


@pytest.mark.parametrize(
    ("operator", "arguments", "expected"),
    [
        ("_scaled_dot_product_efficient_attention_backward", (None,) * 9 + (0.1, [True] * 4), True),
        ("_scaled_dot_product_efficient_attention_backward", (None,) * 9 + (0.0, [True] * 4), False),
        ("_scaled_dot_product_flash_attention_backward", (None,) * 10 + (0.1, False, None, None), True),
        ("_scaled_dot_product_efficient_attention", (None,) * 4 + (True, 0.1), False),
        ("native_dropout", (None, 0.1, True), False),
        ("gelu", (None,), False),
    ],
)
def test_a_kernel_that_reads_a_seed_is_not_measured(operator: str, arguments: tuple, expected: bool) -> None:
    """Kernels that read a seed are found: CUDA's attention reads it in host memory, not on the traced device."""
    node = torch.fx.Graph().call_function(getattr(torch.ops.aten, operator).default, arguments)
    assert fx_graph.reads_seed(node) == expected


def test_what_is_not_measured_is_estimated(roberta: Captured) -> None:
    known: dict[str, costs.Measured] = {}
    found = measured(roberta, known, limit=1e-9)
    assert not known and set(found.seconds) == {0.0}


def test_measuring_allocates_no_more_than_there_is_room_for() -> None:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.gelu(x @ up) @ down).square().sum()

    given = [torch.ones(shape, requires_grad=True) for shape in ((64, 256), (256, 1024), (1024, 64))]
    captured = capture(step, *given)
    (rows,) = [symbol for symbol, size in captured.sizes.items() if size == 64][:1]
    sizes = {**captured.sizes, rows: 64_000}
    of_joint = works(captured.joint, sizes)

    def found(known: dict[str, costs.Measured], room: int | None) -> tuple[int, costs.Costs]:
        peak, _, result = allocated(
            lambda: costs.measured(captured.joint, sizes, of_joint, False, known, limit=60.0, room=room)
        )
        return peak, result

    known: dict[str, costs.Measured] = {}
    most, free = found({}, None)
    least, bounded = found(known, 64 * 2**20)
    assert most > 500 * 2**20 and least <= 64 * 2**20
    # Times extrapolated from smaller sizes are not cached.
    assert {work.key for work in of_joint if work is not None and work.flops}.isdisjoint(known)
    for seconds, expected, work in zip(bounded.seconds, free.seconds, of_joint, strict=True):
        assert (seconds > 0) == (expected > 0)
        if work is not None and work.flops:
            # Wide bounds, as other processes may run.
            assert 0.05 * expected <= seconds <= 20 * expected


def test_buffers_of_library_kernels_are_measured() -> None:
    """Measured workspaces include oneDNN's half-precision buffers, whose size depends on the processor."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).square().sum()

    given = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((1568, 97), (97, 16))]
    captured = capture(step, *given)
    graph, found = captured.graph, measured(captured, {})
    problem_at = problems_of(graph, found.seconds, found.workspaces)
    problem = problem_at(graph.size_hints)
    x, weight, gradient = (one.detach() for one in (*given, torch.ones(1568, 16, dtype=torch.bfloat16)))
    products = [lambda: x @ weight, lambda: x.t() @ gradient, lambda: gradient @ weight.t()]
    seen = sorted(problem.workspaces[node] for node, kind in enumerate(problem.kinds) if "mm" in kind)
    expected = []
    for product in products:
        peak, _, result = allocated(product)
        expected.append(peak - result.nbytes)
    assert seen == sorted(expected)
    halved = problem_at({symbol: size // 2 for symbol, size in graph.size_hints.items()})
    assert all(now < size for now, size in zip(halved.workspaces, problem.workspaces, strict=True) if size)


def test_a_profiler_that_is_on_does_not_keep_seconds_from_being_measured(roberta: Captured) -> None:
    known: dict[str, costs.Measured] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        measured(roberta, known)
    assert any("addmm" in key for key in known)


def test_costs_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "costs.json"
    with known_costs(path) as known:
        known["gelu"] = costs.Measured(1.5, 64)
    with known_costs(path) as known:
        assert known == {"gelu": costs.Measured(1.5, 64)}


# Entries of an earlier version, out of range, or of a wrong type.
NO_COST = ["1.5", "[Infinity, 1]", "[NaN, 1]", "[-1.5, 1]", "[0, 1]", "[1e300, 1]", f"[1{'0' * 400}, 1]", "[true, 1]"]
NO_COST += ['["1.5", 1]', "[1.5, Infinity]", "[1.5, -1]", "[1.5, 1e3]", f"[1.5, 1{'0' * 400}]", "[1.5]", "[[1.5], 1]"]


@pytest.mark.parametrize(
    "text", ["[1", "[" * 100_000, "[1]", "3", *(f'{{"gelu": {one}}}' for one in [*NO_COST, "null"])]
)
def test_what_is_no_cost_on_disk_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text if not text.startswith("{") else f'{{"addmm": [2.5, 0], {text[1:]}')
    good = {"addmm": costs.Measured(2.5, 0)} if text.startswith("{") else {}
    with known_costs(path) as known:
        assert known == good
        known["gelu"] = costs.Measured(1.5, 64)
    with known_costs(path) as known:
        assert known == {**good, "gelu": costs.Measured(1.5, 64)}


def test_ranks_that_start_together_have_the_same_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with ThreadPoolExecutor() as pool:
        with known_costs(path) as known:
            other = pool.submit(lambda: _cost_of_gelu(path, 2.5))
            time.sleep(0.2)
            known["gelu"] = costs.Measured(1.5, 64)
        assert other.result() == costs.Measured(1.5, 64)


def _cost_of_gelu(path: Path, seconds: float) -> costs.Measured:
    with known_costs(path) as known:
        return known.setdefault("gelu", costs.Measured(seconds, 0))


def test_costs_are_measured_each_time_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        with known_costs(tmp_path / "file" / "costs.json") as known:
            assert known == {}
            known["gelu"] = costs.Measured(1.5, 64)


def costs_are_none(path: Path) -> None:
    with known_costs(path) as known:
        assert known == {}
        known["gelu"] = costs.Measured(1.5, 64)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs_are_none(path)
    there = sorted(one.name for one in tmp_path.iterdir())
    path.unlink()
    path.mkdir()
    costs_are_none(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == there
    path.rmdir()
    # Like a full disk: a file can be created, but not written.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        costs_are_none(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not {one.name for one in tmp_path.iterdir()} - set(there)
    assert not path.exists()


def test_a_user_without_a_home_has_the_cache_in_a_temporary_folder(tmp_path, monkeypatch) -> None:
    for name in ("OPTIMUM_MEMOPT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = cache_path(torch.device("cpu"))
    assert tmp_path in path.parents
    costs_are_none(path)
    assert path.exists()


def test_a_device_by_name_or_file(tmp_path: Path) -> None:
    assert device_of("rtx4090") is device_of("RTX 4090") is DEVICES["RTX 4090"]
    path = tmp_path / "own.json"
    path.write_text(json.dumps(FIELDS))
    assert device_of(str(path)).product_rate("bfloat16") == pytest.approx(0.75e12)
    for name, why in (("B9000", "allowed: H100"), ("no.json", "No such file")):
        with pytest.raises(MemOptError, match=why):
            device_of(name)


CUDA = {"capability": "8.6", "multiprocessors": 72, "threads": 1536}
FIELDS = {"name": "own", "memory": 2**30, "bandwidth": 1e11, "flops": {"float32": 1e12}, "link": 1e10}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "needed are name, memory"),
        ("[1]", "needed are name, memory"),
        ("{}", "there is no 'flops'"),
        *(
            (json.dumps({**FIELDS, **changes}), why)
            for changes, why in (
                ({"flops": {}}, "flops has no float32"),
                ({"flops": 3}, "has no attribute 'items'"),
                ({"flops": {"float32": float("nan")}}, "flops of float32 is nan, not a number from 1e"),
                ({"flops": {"float32": 1e12, "b" * 500: "fast"}}, "flops of bbb"),
                *(({"memory": no}, f"memory is {no}, not a number") for no in (float("inf"), "80GiB", -1)),
                ({"memory": 10**400}, "memory is 1000"),
                *(({"bandwidth": no}, f"bandwidth is {no}, not a number") for no in (True, 1e-300)),
                ({"link": 1e300}, "link is 1e\\+300, not a number"),
                ({"link": ""}, "link is '', not a number"),
                ({"name": ["own"]}, r"name is \['own'\], not a text"),
                ({"name": "own\nline"}, "not a text"),
                ({"cuda": True}, "cuda is True, not an object"),
                ({"cuda": {}}, "there is no 'capability'"),
                *(
                    ({"cuda": {**CUDA, "capability": no}}, f"cuda.capability is {no}, not a number as 8.6")
                    for no in (8, "sm_86", "8.-6")
                ),
                *(({"cuda": {**CUDA, "threads": no}}, "cuda.threads is") for no in (0, 1.5, 10**9, "1536")),
            )
        ),
    ],
)
def test_a_device_file_that_cannot_be_is_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(text)
    with pytest.raises(MemOptError, match=why) as refused:
        device_of(str(path))
    line = str(refused.value)
    assert str(path) in line and "\n" not in line and len(line) < 320 + len(str(path))


def test_a_graph_is_run_for_each_batch(roberta: Captured) -> None:
    rows = [symbol for symbol, name in roberta.names.items() if name.endswith("dim0")]
    few, many = ({**roberta.sizes, **dict.fromkeys(rows, count)} for count in (2, 64))
    before = torch.get_rng_state()
    found = replayed(roberta.graph, [few, many])
    assert found is not None and 0 < found[0] < found[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_graph_that_does_not_run_takes_nothing(roberta: Captured) -> None:
    assert replayed(roberta.graph, [dict.fromkeys(roberta.sizes, -1)]) is None
