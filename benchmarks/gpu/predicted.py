"""The part `predicted` of gpu/acceptance.py: predicted bytes, budgets and hidden copies against GPU measurements."""

import functools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu.checks import ALONE, Check, Figure, Setting, Turn, clean_up, within
from gpu.steps import BASE, MIB, MODELS, TINY, Held, Shape, adamw, batch_of, build, offload_config, planned, train

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.predict.estimate import estimate
from optimum_memopt.engines.compile.predict.step_limit import bounded_bytes
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.predict.workload import Workload
from optimum_memopt.step_settings import StepSpec

# Limits relative to the predicted peak; reserved bytes also depend on the allocator's fragmentation.
_REQUESTED, _ALLOCATED, _RESERVED = 0.005, 0.03, 0.25
_PLAN_FOR_DEVICE = 0.02
_HALFWAY = 0.5


def shape_of(setting: Setting) -> Shape:
    return TINY if setting.quick else BASE


def _steps(setting: Setting) -> int:
    return 2 if setting.quick else 8


def against_prediction(name: str, engine: CompileEngine, optimizer: Any, held: Held) -> Iterator[Figure]:
    """Compare measured peaks with the predicted one."""
    predictor = engine.predictor
    assert predictor is not None
    footprint = predictor.footprint(optimizer=optimizer)
    data = {"predicted": footprint.peak, **vars(held), "parts": vars(footprint)}
    for kind, limit in (("requested", _REQUESTED), ("allocated", _ALLOCATED), ("reserved", _RESERVED)):
        measured = getattr(held, kind)
        apart = measured / footprint.peak - 1
        text = f"{measured / MIB:.1f} MiB, {apart:+.2%}"
        is_right = abs(apart) <= limit if kind == "requested" else apart <= limit
        yield Figure(f"{name}, {kind}", is_right, text, f"{limit:.1%}", data)


def peaks(setting: Setting, model: str, dtype: str, compiler: str, plan: str) -> Iterator[Figure]:
    """Measure a plan's step, and compare its peaks with the prediction."""
    shape = shape_of(setting)
    trained, batch = build(model, shape, dropout=0.1), batch_of(shape)
    optimizer = adamw(trained)
    compiler = setting.compiler(model) if compiler == "inductor" else compiler
    engine = planned(trained, compiler=compiler, level=1 if plan == "level 1" else 0)
    held = train(trained, batch, dtype, optimizer, _steps(setting))
    yield from against_prediction(plan, engine, optimizer, held)


def offload(setting: Setting, model: str, dtype: str, compiler: str) -> Iterator[Figure | Turn]:
    """Offload all activations; checks the bytes, and the share of the copy time that is hidden."""
    shape = shape_of(setting)
    trained, batch = build(model, shape, dropout=0.1), batch_of(shape)
    optimizer = adamw(trained)
    engine = planned(trained, compiler=compiler, loss="plain")
    yield ALONE
    without = train(trained, batch, dtype, optimizer, _steps(setting))
    table = engine.plans()
    config = offload_config(table.plans if table is not None else ())
    engine.detach()
    # States of an earlier optimizer would be counted twice.
    del trained, optimizer, engine
    clean_up()
    trained = build(model, shape, dropout=0.1)
    optimizer = adamw(trained)
    engine = planned(trained, compiler=compiler, loss="plain", config=config)
    held = train(trained, batch, dtype, optimizer, _steps(setting))
    yield from against_prediction("offload", engine, optimizer, held)
    table = engine.plans()
    assert table is not None
    moved = sum(row.applied_saving_bytes or 0 for row in table.enabled)
    copies = 2 * moved / _link_rate(setting)
    more = held.seconds - without.seconds
    hidden = 1 - more / copies if copies else 1.0
    data = {"moved": moved, "copy_seconds": copies, "seconds": held.seconds, "seconds_without": without.seconds}
    saved = (without.allocated - held.allocated) / MIB
    yield Figure("saved at the peak", saved > 0, f"{saved:.0f} of {moved / MIB:.0f} MiB", "> 0", data)
    shown = f"{hidden:.0%} of {copies * 1000:.0f} ms"
    # A step shorter than its copies cannot hide them.
    is_right = setting.quick or hidden >= _HALFWAY or copies > without.seconds
    yield Figure("copies hidden", is_right, shown, f"{_HALFWAY:.0%} where the step is longer", data)


def _link_rate(setting: Setting) -> float:
    """Returns the bytes per second of a copy from pinned memory."""
    size = MIB if setting.quick else 512 * MIB
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = host.cuda()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(4):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * size / (time.perf_counter() - begin)


def budgets(setting: Setting, model: str, dtype: str, compiler: str) -> Iterator[Figure]:
    """Check that three budgets between level 1 and no plan are neither exceeded nor left unused."""
    shape, compiler = shape_of(setting), setting.compiler(model) if compiler == "inductor" else compiler
    batch = batch_of(shape)
    ends = {}
    for level in (0, 1):
        trained = build(model, shape, dropout=0.1)
        optimizer = adamw(trained)
        engine = planned(trained, compiler=compiler, level=level)
        # The first step creates the optimizer's states, which the prediction of the next step includes.
        train(trained, batch, dtype, optimizer, steps=1, warm=1)
        assert engine.predictor is not None
        ends[level] = bounded_bytes(engine.predictor, optimizer=optimizer)
        engine.detach()
        del trained, optimizer, engine
        clean_up()
    for share in (0.8, 0.5, 0.2):
        budget = int(ends[1] + share * (ends[0] - ends[1])) // MIB + 1
        trained = build(model, shape, dropout=0.1)
        optimizer = adamw(trained)
        engine = planned(trained, compiler=compiler, budget=f"{budget}MiB")
        held = train(trained, batch, dtype, optimizer, _steps(setting))
        assert engine.predictor is not None
        predicted = engine.predictor.footprint(optimizer=optimizer).peak
        blocks = bounded_bytes(engine.predictor, optimizer=optimizer)
        peak = held.allocated / MIB
        data = {"budget": budget, "predicted": predicted, "blocks": blocks, **vars(held)}
        name = f"{share:.0%} of the way"
        yield Figure(f"{name}, peak", peak <= budget, f"{peak:.1f} MiB", f"{budget} MiB", data)
        for kind, of_kind, limit in (("requested", predicted, _REQUESTED), ("allocated", blocks, _ALLOCATED)):
            apart = abs(getattr(held, kind) / of_kind - 1)
            yield within(f"{name}, {kind} against prediction", apart, limit, "{:.2%}")
        engine.detach()
        del trained, optimizer, engine
        clean_up()


def another_batch(setting: Setting, model: str) -> Iterator[Figure]:
    """Train a larger batch than the compiled one, without a recompile."""
    shape = shape_of(setting)
    larger = replace(shape, batch=shape.batch + 2)
    trained = build(model, shape, dropout=0.1)
    optimizer = adamw(trained)
    engine = planned(trained, dynamic=True, level=1, compiler=setting.compiler(model))
    train(trained, batch_of(shape), "bf16", optimizer, steps=1, warm=1)
    held = train(trained, batch_of(larger), "bf16", optimizer, _steps(setting))
    predictor = engine.predictor
    assert predictor is not None
    footprint = predictor.footprint(predictor.sizes_of(batch_of(larger)), optimizer)
    apart = abs(held.requested / footprint.peak - 1)
    yield within("requested", apart, _REQUESTED, "{:.2%}", predicted=footprint.peak, **vars(held))


def plan_for_device(setting: Setting, model: str) -> Iterator[Figure]:
    """Compare `optimum-cli memopt plan --device h100`, which runs no step, with a step."""
    shape = shape_of(setting)
    trained = build(model, shape, dropout=0.1)
    with tempfile.TemporaryDirectory() as folder:
        trained.config.save_pretrained(folder)
        task = "text-generation" if model == "llama" else "fill-mask"
        workload = Workload(folder, task, shape.batch, shape.length, padding=False)
        told = estimate(workload, Selection(level=1), StepSpec(device="h100", compiler="aot_eager"))
    optimizer = adamw(trained)
    engine = planned(trained, compiler="aot_eager", level=1)
    held = train(trained, batch_of(shape), "fp32", optimizer, _steps(setting))
    assert engine.predictor is not None
    # The plan does not include what the process held before.
    before = engine.predictor.footprint(optimizer=optimizer).constant
    predicted = told.peak_mib * MIB - told.parts["constant"]
    apart = abs((held.requested - before) / predicted - 1)
    yield within("requested", apart, _PLAN_FOR_DEVICE, "{:.2%}", predicted=predicted, **vars(held))


def _checks() -> Iterator[Check]:
    def peak(model: str, dtype: str, compiler: str, plan: str) -> Check:
        run = functools.partial(peaks, model=model, dtype=dtype, compiler=compiler, plan=plan)
        return Check(f"{model}, {dtype}, {compiler}, {plan}", run)

    def copies(name: str, model: str, compiler: str) -> Check:
        return Check(name, functools.partial(offload, model=model, dtype="bf16", compiler=compiler), seconds=180)

    def within_budgets(name: str, model: str, compiler: str, seconds: int) -> Check:
        run = functools.partial(budgets, model=model, dtype="bf16", compiler=compiler)
        return Check(name, run, seconds=seconds, needs=("scipy",))

    for model in MODELS:
        yield peak(model, "bf16", "inductor", "level 1")
    for model in MODELS:
        yield peak(model, "fp32", "aot_eager", "no plan")
    yield copies("offload, roberta, bf16", "roberta", "inductor")
    yield within_budgets("budgets, roberta, bf16", "roberta", "aot_eager", seconds=180)
    for model in MODELS:
        yield peak(model, "bf16", "aot_eager", "no plan")
    for model in MODELS:
        yield Check(f"plan --device h100, {model}", functools.partial(plan_for_device, model=model))
    yield Check("another batch, llama", functools.partial(another_batch, model="llama"))
    for model in MODELS:
        yield peak(model, "fp32", "inductor", "level 1")
    yield copies("offload, llama, bf16", "llama", "aot_eager")
    yield within_budgets("budgets, deberta-v2, bf16, inductor", "deberta-v2", "inductor", seconds=240)
    for model in MODELS:
        yield peak(model, "bf16", "inductor", "no plan")


CHECKS = tuple(_checks())
