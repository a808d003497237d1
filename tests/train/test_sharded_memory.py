"""FSDP2: a rank's step is predicted to the byte. torch's `fake` process group transfers and allocates nothing, so a
single process measures exactly the allocations of a rank."""

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from allocations import allocated
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_memopt import MemOptError, optimize, plan
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture.capture import check_model
from optimum_memopt.engines.compile.capture.ranks import planned_ranks
from optimum_memopt.engines.compile.predict.estimate import estimate
from optimum_memopt.engines.compile.predict.micro_batches import of_workload
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.predict.workload import Workload
from optimum_memopt.sizes import MIB, Budget, parse_budget
from optimum_memopt.step_settings import StepSpec
from tests.compiled import below_recompute, hold_still
from tests.fresh_process import run
from tests.gradients import Batch
from tests.rotation import in_turn, nightly
from tests.train.test_segments import attached

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain"}
# By case: modules that are sharded besides layers and the model, options of sharding, and the plan.
CASES: dict[str, dict[str, Any]] = {
    "no_plan": {"units": ["embed", "tail"]},
    "level": {"units": ["embed", "tail"], "plan": {"memory_opt_level": 1}},
    "root": {"plan": {"memory_opt_level": 1}},
    "gathered": {
        "units": ["embed", "tail"],
        "plan": {"memory_opt_level": 1},
        "shard": {"reshard_after_forward": False},
    },
    "frozen": {"trained": "q_proj", "plan": {"memory_opt_level": 1}},
    "half": {"units": ["embed", "tail"], "shard": {"mp_policy": HALF}},
    # Two replicas of eight shards.
    "hybrid": {"units": ["embed", "tail"], "plan": {"memory_opt_level": 1}, "mesh": (2, 8)},
    "ignored": {"units": ["embed", "tail"], "plan": {"memory_opt_level": 1}, "ignored": "up_proj"},
    "many": {"units": ["tail"], "plan": {"memory_opt_level": 1}, "ranks": 1024},
}


@contextlib.contextmanager
def sharded(
    units: tuple[str, ...] = (),
    shard: dict[str, Any] | None = None,
    trained: str = "",
    ranks: int = 8,
    mesh: Any = None,
    ignored: str = "",
    layers: int = CONFIG.num_hidden_layers,
    group: AbstractContextManager[DeviceMesh] | None = None,
) -> Iterator[LlamaForCausalLM]:
    """Yields a model on one rank of a `fake` process group, or of `group`."""
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": layers}))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    more = dict(shard or {})
    if ignored:
        more["ignored_params"] = {parameter for name, parameter in model.named_parameters() if ignored in name}
    with group or planned_ranks(ranks if mesh is None else math.prod(mesh), "cpu") as whole:
        mesh = whole if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, **more)
        if "embed" in units:
            fully_shard(model.model.embed_tokens, mesh=mesh, **more)
        if "tail" in units:
            fully_shard([model.model.norm, model.lm_head], mesh=mesh, **{**more, "reshard_after_forward": False})
        more.pop("reshard_after_forward", None)
        fully_shard(model, mesh=mesh, **more)
        yield model


def own_bytes(parameter: torch.Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes


@contextlib.contextmanager
def moved() -> Iterator[dict[str, int]]:
    """Yields the bytes of other ranks' shards that this rank gathers, and of their gradients that it sends."""
    found = {"gathered": 0, "reduced": 0}
    gather, reduce = DefaultAllGather.__call__, DefaultReduceScatter.__call__

    def gathered(own: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found["gathered"] += output_tensor.nbytes - input_tensor.nbytes
        return gather(own, output_tensor, input_tensor, *args, **options)

    def reduced(own: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found["reduced"] += input_tensor.nbytes - output_tensor.nbytes
        return reduce(own, output_tensor, input_tensor, *args, **options)

    with (
        mock.patch.object(DefaultAllGather, "__call__", gathered),
        mock.patch.object(DefaultReduceScatter, "__call__", reduced),
    ):
        yield found


def masked_batch() -> Batch:
    ids = torch.randint(3, 512, (4, 64))
    mask = torch.ones_like(ids)
    mask[0, 50:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def measured_step(model: torch.nn.Module, batch: Batch) -> tuple[int, int]:
    """Returns the saved bytes and the peak of a step."""
    model.zero_grad(set_to_none=True)
    up, saved, loss = allocated(lambda: model(**batch).loss)
    down, _, _ = allocated(loss.backward)
    return saved, max(up, saved + down)


@pytest.mark.parametrize("name", nightly(CASES, but=["level"]))
def test_a_step_is_predicted_to_the_byte(name: str) -> None:
    case = dict(CASES[name])
    wanted = case.pop("plan", {})
    batch = masked_batch()
    with sharded(**case) as model:
        engine = optimize(model, **ENGINE, **wanted)
        # The first three backwards have copies of frozen weights on the host, which is also the device here.
        for _ in range(3):
            measured_step(model, batch)
        with moved() as between:
            saved, peak = measured_step(model, batch)
        assert isinstance(engine, CompileEngine) and engine.predictor is not None
        footprint = engine.predictor.footprint()
        parameters = sum(map(own_bytes, model.parameters()))
        assert footprint.parameters == parameters
        assert engine.predictor.tape.moved == tuple(between.values())
        # The tolerance is for the loss itself.
        assert abs(engine.predictor.saved() - saved) <= 64
        assert abs(footprint.activations - peak) <= 64

        def accumulate() -> None:
            model.zero_grad(set_to_none=True)
            for is_last in (False, True):
                model.set_requires_gradient_sync(is_last)
                model(**batch).loss.backward()

        # As gradients are reduced, those of earlier micro-batches are freed, too.
        both, whole = allocated(accumulate)[0], engine.predictor.footprint(gradient_accumulation=True)
        assert both <= whole.accumulated + whole.activations
        if name == "level":
            assert whole.accumulated + whole.activations < 1.25 * both


@pytest.mark.nightly
def test_real_ranks_are_predicted_to_the_byte(tmp_path: Path) -> None:
    """The steps of real ranks are predicted to the byte, without gloo's internal buffers."""
    names, out = ("no_plan", "level", "frozen", "gathered", "half"), tmp_path / "found.json"
    done = run(Path(__file__).with_name("sharded_memory_runs.py"), out, *names, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert list(found) == list(names)
    for name, step in found.items():
        for measured, predicted in zip(step["measured"], step["predicted"], strict=True):
            assert abs(measured - predicted) <= 64, name
        assert "FSDP2 on 2 ranks" in step["header"]


# By how many bytes the budget is below the peak of recompute inside layers: one, or more than a layer's input.
SEGMENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "released": (768 * 2**10, {"units": ["embed", "tail"]}),
    "gathered": (1, {"units": ["embed", "tail"], "shard": {"reshard_after_forward": False}}),
    "half": (384 * 2**10, {"units": ["embed", "tail"], "shard": {"mp_policy": HALF}}),
    "root": (1, {}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEGMENTS)
def test_layers_that_run_again_are_gathered_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_still(monkeypatch)
    ids = torch.randint(3, 512, (4, 256))
    batch = {"input_ids": ids, "attention_mask": (ids > 3).long(), "labels": ids}
    less, how = SEGMENTS[name]
    with sharded(**how, layers=9) as model, below_recompute(less):
        engine = attached(model, Selection(budget=Budget("2 GiB", 2**31)))
        measured_step(model, batch)
        with moved() as between:
            saved, peak = measured_step(model, batch)
        footprint = engine.predictor.footprint()
        assert any(engine.predictor.tape.repeated)
        assert abs(engine.predictor.saved() - saved) <= 64
        assert abs(footprint.activations - peak) <= 64
        assert engine.predictor.tape.moved == tuple(between.values())


@pytest.mark.nightly
def test_closer_than_torchs_tracker() -> None:
    """The prediction is closer to the allocator's peak than torch's tracker, which counts plain PyTorch's storages."""
    ids = torch.randint(3, 512, (4, 64))

    def peak(model: LlamaForCausalLM) -> int:
        up, saved, loss = allocated(lambda: model(input_ids=ids, labels=ids).loss)
        down, _, _ = allocated(loss.backward)
        model.zero_grad(set_to_none=True)
        return max(up, saved + down)

    with sharded(("embed", "tail")) as model:
        peak(model)
        plain = peak(model)
        held = sum(map(own_bytes, model.parameters())) + ids.nbytes
        tracker = FSDPMemTracker(model)
        tracker.track_inputs((ids,))
        with tracker:
            model(input_ids=ids, labels=ids).loss.backward()
        (tracked,) = (device["Total"] - held for device in tracker.get_tracker_snapshot("peak").values())
    with sharded(("embed", "tail")) as model:
        engine = optimize(model, **ENGINE)
        peak(model)
        own = peak(model)
        assert isinstance(engine, CompileEngine) and engine.predictor is not None
        predicted = engine.predictor.footprint().activations
    assert abs(tracked - plain) < 0.01 * plain
    assert abs(predicted - own) <= 64 < abs(tracked - plain)


@in_turn
def test_a_rank_is_planned_without_any() -> None:
    excepthook = sys.excepthook
    whole, rank, level = (
        plan(CONFIG, "text-generation", batch_size=4, seq_len=64, device="h100", compiler="aot_eager", **more)
        for more in ({}, {"fsdp": 8}, {"fsdp": 8, "level": 1})
    )
    assert "FSDP2 on 8 ranks" in rank.table.header[0] and "ranks" not in whole.table.header[0]
    assert whole.breakdown["optimizer"] == 8 * rank.breakdown["optimizer"]
    assert level.peak < rank.peak < whole.peak
    assert sys.excepthook is excepthook and not torch.distributed.is_initialized()


@pytest.mark.nightly
def test_a_rank_is_planned_within_a_budget() -> None:
    step = {"batch_size": 4, "seq_len": 64, "device": "h100", "fsdp": 8}
    rank, level = (
        plan(CONFIG, "text-generation", compiler="aot_eager", **step, **more) for more in ({}, {"level": 1})
    )
    budget = (level.peak + 2 * rank.peak) // 3 // 2**20
    assert plan(CONFIG, "text-generation", **step, budget=f"{budget}MiB").peak <= budget * 2**20


@pytest.mark.nightly
def test_the_third_gather_of_a_layer_takes_time(tmp_path: Path) -> None:
    """Segments of three layers gather their first layer a third time, at the rate of the only link."""
    # With so many layers, segments of three reach a lower peak than segments of two.
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 15})
    file = tmp_path / "own.json"

    def planned(link: float, **selected: Any) -> tuple[float, float]:
        """Returns the peak, and the increase of the step time in percent."""
        rates = {"name": "own", "memory": 2**36, "bandwidth": 1e12, "flops": {"float32": 1e13}, "link": link}
        file.write_text(json.dumps(rates))
        step = {"batch_size": 4, "seq_len": 256, "device": str(file), "compiler": "aot_eager", "fsdp": 8}
        found = plan(config, "text-generation", **step, **selected)
        longer = re.search(r"\+([0-9.]+)% time", found.table.header[0])
        return found.peak, float(longer[1]) if longer else 0.0

    with pytest.raises(DoesNotFitError) as refused:
        planned(3e10, budget="1MiB")
    budget = f"{math.ceil(refused.value.lowest / 2**10)}KiB"
    (of_fast, fast), (of_slow, slow) = (planned(link, budget=budget) for link in (3e10, 3e8))
    assert of_fast == of_slow
    assert slow > 1.5 * fast > 0


@in_turn
def test_plain_pytorch_is_not_simulated_on_ranks() -> None:
    estimate = plan(CONFIG, "text-generation", batch_size=4, seq_len=64, device="h100", fsdp=2)
    with pytest.raises(MemOptError, match="ways together with fsdp: plain PyTorch is simulated on one device"):
        _ = estimate.ways
    with planned_ranks(2, "cpu"), pytest.raises(MemOptError, match="cannot be predicted in a distributed process"):
        plan(CONFIG, "text-generation", batch_size=4, seq_len=64, fsdp=2)


def test_fsdp_1_in_a_loop_is_refused() -> None:
    with planned_ranks(2, "cpu"):
        model = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu")))
        with pytest.raises(MemOptError, match="does not support FSDP 1, .*or `fully_shard`"):
            optimize(model, memory_opt_engine="compile", memory_opt_level=1)


def test_shares_on_the_host_are_refused() -> None:
    with sharded(shard={"offload_policy": CPUOffloadPolicy(pin_memory=False)}) as model:
        check_model(model)
        for module in model.modules():
            for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
                for parameter in group.fsdp_params:
                    parameter.device = torch.device("cuda")
        with pytest.raises(MemOptError, match="does not support FSDP2's CPU offload: .*turn it off"):
            check_model(model)


@pytest.mark.nightly
def test_the_advice_for_a_rank_is_the_plan_of_a_rank() -> None:
    workload = Workload(CONFIG, "text-generation", 8, 64)
    spec = StepSpec("h100", "aot_eager", bf16=True, loss="plain", fsdp=8)
    steps = of_workload(workload, parse_budget("1GiB"), spec)
    assert {one.name for one in steps.plans} == {"no plan", "level 1", "budget"}
    (remark,) = steps.remarks
    assert remark.startswith("Predicted for each of 8 ranks: ")
    for name, level in (("no plan", 0), ("level 1", 1)):
        rank = estimate(workload, Selection(level=level), spec)
        assert remark in rank.table.header
        plan = next(one for one in steps.plans if one.name == name and not one.chunks_loss)
        assert steps.step(plan, 8, 1).peak == pytest.approx(rank.peak_mib * MIB, rel=0.01)
    # Gradients of all layers are unsharded until the last micro-batch.
    more = steps.step(plan, 8, 2).peak - steps.step(plan, 8, 1).peak
    assert more > 0.5 * 8 * rank.parts["gradients"] / 2
