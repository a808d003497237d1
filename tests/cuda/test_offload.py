import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from gpu.steps import forward
from torch.utils._python_dispatch import TorchDispatchMode

from optimum_memopt.engines.compile.memory.inductor_programs import InductorProgram, _sized
from optimum_memopt.engines.compile.partition import host_copies
from optimum_memopt.engines.compile.partition.host_copies import PinnedPool
from optimum_memopt.engines.torch_compat import dynamo, inductor
from tests.cuda.steps import training

SCRIPT = Path(__file__).with_name("late_copies.py")
OFFLOAD = "Gelu+:3:-1"
is_standin = hasattr(ctypes.CDLL(None), "standin_bytes")
of_standin = pytest.mark.skipif(not is_standin, reason="needs the stand-in, which decides when copies run")


def late_copies(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "CUDA_STANDIN_DATA": "1"}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@of_standin
def test_nothing_is_lost_where_copies_run_as_late_as_they_may() -> None:
    done = late_copies()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "0 wrong, 0 copies under way, 6 activations pinned"


@of_standin
def test_without_waits_data_is_lost() -> None:
    """Data is lost without waits; otherwise the previous test would prove nothing."""
    done = late_copies("--without-waits")
    assert done.returncode == 1 and "1 wrong" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_the_prediction_knows_where_copies_are(compiler: str) -> None:
    offloaded = training("roberta", "fp32", memory_opt_config=OFFLOAD, memory_opt_compiler=compiler)
    kept = training("roberta", "fp32", memory_opt_config="Gelu+:3:0", memory_opt_compiler=compiler)
    offloaded.step()
    measured = offloaded.step().activations
    assert measured == pytest.approx(offloaded.engine.predictor.footprint().activations, rel=0.01)
    kept.step()
    # Two layers and the head, in float32.
    gelus = (2 * 3072 + 768) * 8 * 256 * 4
    assert kept.engine.predictor.saved() - offloaded.engine.predictor.saved() == gelus


def pool() -> PinnedPool:
    return host_copies._of(torch.device("cuda", 0)).pool


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_the_header_says_what_is_pinned(compiler: str) -> None:
    """Each step uses the same memory, and other pinned memory of torch is not counted."""
    offloaded = training("roberta", "fp32", memory_opt_config=OFFLOAD, memory_opt_compiler=compiler)
    offloaded.step()
    taken = pool().bytes
    assert offloaded.engine.plans().header[-1].endswith(f"in {taken / 2**20:.1f} MiB of pinned memory")
    blocks = {block.address for block in pool()._blocks}
    offloaded.step()
    assert {block.address for block in pool()._blocks} == blocks and pool().bytes == taken
    offloaded.engine.detach()
    assert pool().bytes == 0


def test_several_forwards_have_memory_of_their_own() -> None:
    offloaded = training("roberta", "fp32", memory_opt_config=OFFLOAD)
    offloaded.step()
    taken = pool().bytes
    losses = [forward(offloaded.model, offloaded.batch, "fp32") for _ in range(2)]
    assert pool().bytes == 2 * taken
    # Memory that a later backward reads is kept.
    offloaded.engine.suspend()
    assert pool().bytes == 2 * taken
    sum(losses).backward()
    del losses
    offloaded.engine.detach()
    host_copies.release_pinned()
    assert pool().bytes == 0


def test_copies_are_from_and_to_pinned_memory() -> None:
    activation = torch.zeros(1000, device="cuda", dtype=torch.bfloat16).as_strided((10, 20), (50, 2))
    host = torch.ops.optimum_memopt.offload(activation)
    assert host.is_pinned() and host.stride() == (50, 2)
    torch.ops.optimum_memopt.wait(host, activation, [])


def test_inductor_computes_between_a_copy_and_its_wait() -> None:
    """Products run between each copy and its wait; inductor's own order would put the wait right after the copy."""
    trained = training("roberta", "fp32", memory_opt_config=OFFLOAD, memory_opt_compiler="inductor")
    trained.step()
    graph = trained.engine.predictor.graphs[0]
    # The head's gelu is last in the forward and first in the backward, so there is nothing to compute meanwhile.
    for program, begins, layers in (
        (graph.programs.forward, "offload", slice(0, 2)),
        (graph.programs.backward, "reload", slice(1, 3)),
    ):
        called = calls_of(program, graph.sizes)
        begun = [index for index, name in enumerate(called) if name == begins]
        ended = [index for index, name in enumerate(called) if name == "wait"]
        # Two layers and the head.
        assert len(begun) == len(ended) == 3
        for first, last in zip(begun[layers], ended[layers], strict=True):
            assert {"mm", "addmm"} & set(called[first:last]), called


def calls_of(program: InductorProgram, sizes: Mapping[sympy.Symbol, int]) -> list[str]:
    """Returns the operators that inductor's program calls, in order, without its own kernels."""
    with dynamo.fake_tensors(), torch.no_grad():
        arguments = [_sized(argument, sizes) for _, argument in program.inputs]
        with Calls() as calls:
            inductor.silenced(program.runner)(program.runner, arguments)
    return calls.names


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname not in ("empty_strided", "as_strided"):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
