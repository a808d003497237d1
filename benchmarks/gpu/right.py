"""The part `right` of gpu/acceptance.py: gradients against plain PyTorch, reported kernels and buffers against real
ones."""

import functools
import platform
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu.checks import Check, Figure, Setting, within
from gpu.offload import delayed_copies
from gpu.steps import (
    MIB,
    MODELS,
    SMALL,
    TINY,
    OperatorBuffers,
    Shape,
    adamw,
    batch_of,
    build,
    deterministic,
    error_of_all,
    forward,
    gradients,
    largest_error,
    offload_config,
    planned,
    train,
)

from optimum_memopt import optimize
from optimum_memopt.compat.installed import installed_version
from optimum_memopt.engines.compile.capture.backend import missing_for
from optimum_memopt.engines.torch_compat.kernels import without_cudnn_attention
from optimum_memopt.memory.peak_monitor import PeakMonitor

# Allowed relative errors of gradients: the same operators, other kernels, and half precision.
_BITWISE, _FP32, _HALF = 1e-6, 1e-5, 2e-2
_KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
}
_PLANS: dict[str, dict[str, Any]] = {"no plan": {"level": 0}, "level 1": {"level": 1}, "level 2": {"level": 2}}


def shape_of(setting: Setting) -> Shape:
    return TINY if setting.quick else SMALL


def versions(setting: Setting) -> Iterator[Figure]:
    """Report the installed versions, and what inductor lacks on this machine."""
    oldest = {"torch": (2, 9), "transformers": (5, 0), "accelerate": (1, 3)}
    for name, least in oldest.items():
        version = (installed_version((name,)) or ("", "0.0"))[1]
        number = tuple(int(part) for part in version.split(".")[:2])
        yield Figure(name, number >= least, version, ".".join(map(str, least)))
    yield Figure("python", True, platform.python_version())
    yield Figure("device", True, f"{torch.cuda.get_device_name()}, sm_{''.join(map(str, _capability()))}")
    yield Figure("CUDA, cuDNN", True, f"{torch.version.cuda}, {torch.backends.cudnn.version()}")
    lacking = missing_for("cuda")[0]
    yield Figure("inductor", not lacking, lacking or "works", "works")


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def memory_marks(setting: Setting) -> Iterator[Figure]:
    """Check that the monitor's peak equals the allocator's."""
    monitor = PeakMonitor("cuda")
    torch.cuda.reset_peak_memory_stats()
    monitor.start_run()
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    apart = monitor.run_peak - torch.cuda.max_memory_allocated() / MIB
    yield within("monitor and allocator", abs(apart), 0.0, "{:.1f} MiB")


def buffers(setting: Setting, model: str, dtype: str) -> Iterator[Figure]:
    """Compare the workspace of each operator with the predicted one."""
    shape = shape_of(setting)
    trained, batch = build(model, shape), batch_of(shape)
    gradients(trained, batch, dtype)
    seen = OperatorBuffers()
    with seen:
        gradients(trained, batch, dtype)
    apart = sorted(seen.calls, key=lambda call: -abs(call.measured - call.predicted))
    worst = apart[0] if apart else None
    error = abs(worst.measured - worst.predicted) / max(worst.measured, worst.predicted) if worst else 0.0
    name = f"worst of {len(apart)}: {worst.name}" if worst else "none holds any"
    calls = [(call.name, call.measured, call.predicted) for call in apart[:20]]
    yield within(name, error, 0.05, "{:.1%}", calls=calls)


def kernels(setting: Setting, model: str, dtype: str, dropout: float, padding: int) -> Iterator[Figure]:
    """Check that the attention kernel in the table's header is the one that runs."""
    shape = shape_of(setting)
    trained, batch = build(model, shape, dropout), batch_of(shape, padding)
    engine = planned(trained, compiler="aot_eager", loss="plain")
    gradients(trained, batch, dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        gradients(trained, batch, dtype)
    operators = {event.key for event in seen.key_averages()}
    ran = [kernel for operator, kernel in _KERNELS.items() if f"aten::{operator}" in operators]
    table = engine.plans()
    assert table is not None
    told = table.header[0].rpartition("attention: ")[2]
    expected = " and ".join(ran) or ("eager" if model == "deberta-v2" else "math")
    yield Figure("told", told == expected, told, expected)


def gradients_without_compiler(setting: Setting, model: str) -> Iterator[Figure]:
    """Check that gradients without inductor equal plain PyTorch's up to the last bits, under every plan."""
    shape = shape_of(setting)
    batch = batch_of(shape, padding=8)
    with warnings.catch_warnings(), deterministic():
        warnings.simplefilter("ignore")
        trained = build(model, shape)
        expected = gradients(trained, batch)
        yield within("plain PyTorch, twice", largest_error(gradients(trained, batch), expected), _BITWISE)
        rows: Any = ()
        for plan, options in _PLANS.items():
            engine = planned(trained, compiler="aot_eager", loss="plain", **options)
            yield within(plan, largest_error(gradients(trained, batch), expected), _BITWISE)
            table = engine.plans()
            rows = rows or (table.plans if table is not None else ())
            engine.detach()
        engine = planned(trained, compiler="aot_eager", loss="plain", config=offload_config(rows))
        yield within("offload", largest_error(gradients(trained, batch), expected), _BITWISE)
        engine.detach()
        planned(trained, compiler="aot_eager", loss="chunked")
        yield within("chunked loss", largest_error(gradients(trained, batch), expected), _FP32)


def gradients_by_inductor(setting: Setting, model: str, dtype: str, plan: str) -> Iterator[Figure]:
    """Check gradients computed by inductor's kernels, which round differently."""
    shape = shape_of(setting)
    batch = batch_of(shape, padding=8)
    trained = build(model, shape)
    expected = gradients(trained, batch, dtype)
    if plan == "offload":
        engine = planned(trained, compiler="aot_eager", loss="plain")
        gradients(trained, batch, dtype)
        table = engine.plans()
        options = {"config": offload_config(table.plans if table is not None else ())}
        engine.detach()
    else:
        options = _PLANS[plan]
    planned(trained, compiler=setting.compiler(model), loss="plain", **options)
    found = gradients(trained, batch, dtype)
    if dtype == "fp32":
        yield within("worst parameter", largest_error(found, expected), _FP32)
    else:
        yield within("all parameters", error_of_all(found, expected), _HALF, worst=largest_error(found, expected))
    again = gradients(trained, batch, dtype)
    yield within("and once more", error_of_all(again, expected), _FP32 if dtype == "fp32" else _HALF)


def gradients_under_a_budget(setting: Setting) -> Iterator[Figure]:
    """Check the gradients of a solved plan, and of a larger batch, for which the budget is solved again."""
    shape = shape_of(setting)
    batch = batch_of(shape)
    more = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    trained = build("roberta", shape)
    expected, expected_of_more = gradients(trained, batch), gradients(trained, more)
    peaks = []
    for level in (0, 1):
        engine = planned(trained, dynamic=True, compiler="aot_eager", loss="plain", level=level)
        gradients(trained, batch)
        assert engine.predictor is not None
        peaks.append(engine.predictor.footprint(engine.predictor.sizes_of(more)).peak)
        engine.detach()
    budget = f"{sum(peaks) / 2 // MIB + 1:.0f}MiB"
    planned(trained, dynamic=True, compiler="aot_eager", loss="plain", budget=budget)
    yield within(budget, largest_error(gradients(trained, batch), expected), _FP32)
    yield within(f"{budget}, twice the batch", largest_error(gradients(trained, more), expected_of_more), _FP32)


def dropout(setting: Setting) -> Iterator[Figure]:
    """Check the rate of dropout masks, and that a plan recomputes the same masks."""
    from optimum_memopt.engines.compile.partition.dropout import pure_dropout

    elements = 2**16 if setting.quick else 2**26
    for p in (0.1, 0.5):
        kept, _ = pure_dropout(torch.ones(elements, device="cuda"), p, True)
        share = float((kept == 0).double().mean())
        # The limit is six standard deviations.
        yield within(f"rate {p}", abs(share - p), 6 * (p * (1 - p) / elements) ** 0.5)
    shape = shape_of(setting)
    batch, found = batch_of(shape), {}
    for plan in ("no plan", "level 1"):
        trained = build("roberta", shape, dropout=0.1)
        engine = planned(trained, compiler="aot_eager", loss="plain", **_PLANS[plan])
        gradients(trained, batch)
        for again in ("", ", again"):
            torch.manual_seed(1)
            found[plan + again] = gradients(trained, batch)
        found[f"{plan}, another seed"] = gradients(trained, batch)
        engine.detach()
    for name in ("no plan, again", "level 1", "level 1, again"):
        yield within(f"same seed: {name}", largest_error(found[name], found["no plan"]), _FP32)
    apart = largest_error(found["no plan, another seed"], found["no plan"])
    yield Figure("another seed", apart > _HALF, f"{apart:.2e}", f"> {_HALF:.2e}")


def cudnn(setting: Setting) -> Iterator[Figure]:
    """Check that gradients are finite where cuDNN's backward gives NaN (pytorch #196678)."""
    shape = replace(shape_of(setting), length=192)
    batch = batch_of(shape, padding=8)
    trained = build("roberta", shape)
    _make_scores_negative(trained)
    if not setting.quick:
        lost = sum(not bool(gradient.isfinite().all()) for gradient in gradients(trained, batch, "bf16").values())
        yield Figure("plain PyTorch, parameters with NaN", True, str(lost))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with without_cudnn_attention():
        expected = gradients(trained, batch, "bf16")
    planned(trained, compiler="aot_eager", loss="plain")
    found = gradients(trained, batch, "bf16")
    lost = sum(not bool(gradient.isfinite().all()) for gradient in found.values())
    yield within("parameters with NaN", lost, 0, "{:.0f}")
    yield within("all parameters", error_of_all(found, expected), _HALF)
    yield Figure(
        "the switch is as before", torch.backends.cuda.cudnn_sdp_enabled() == before, str(before), str(before)
    )


def _make_scores_negative(model: torch.nn.Module) -> None:
    """Set biases of queries and keys to one opposed component per head, so that all scores are about -120."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.bias", "key.bias")):
                width = parameter.numel() // model.config.num_attention_heads
                parameter.zero_()
                parameter[::width] = 1.0 if "query" in name else -120 * width**0.5


def scaled_fp16(setting: Setting) -> Iterator[Figure]:
    """Check that fp16 with GradScaler and gradient accumulation gives plain PyTorch's losses and scale."""
    shape, steps = shape_of(setting), 3 if setting.quick else 10
    batch, losses, scales = batch_of(shape), {}, {}
    for plan in ("plain PyTorch", "level 1"):
        trained = build("roberta", shape)
        engine = planned(trained, compiler="inductor", loss="plain", level=1) if plan == "level 1" else None
        optimizer, scaler = adamw(trained), torch.amp.GradScaler("cuda", init_scale=2.0**14)
        losses[plan] = []
        for _ in range(steps):
            for _ in range(2):
                loss = forward(trained, batch, "fp16")
                scaler.scale(loss / 2).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses[plan].append(float(loss.detach()))
        scales[plan] = scaler.get_scale()
        if engine is not None:
            engine.detach()
    plain, ours = losses["plain PyTorch"], losses["level 1"]
    apart = max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(plain, ours, strict=True))
    yield within(f"losses of {steps} steps", apart, _HALF, plain=plain, ours=ours)
    same = scales["plain PyTorch"] == scales["level 1"]
    yield Figure("scale", same, str(scales["level 1"]), str(scales["plain PyTorch"]))


def released_gradients(setting: Setting) -> Iterator[Figure]:
    """Check that optimizer steps during the backward give the same weights as steps after it, at no higher peak."""
    shape, steps = replace(shape_of(setting), layers=4), 3
    weights, peaks = {}, {}
    for is_released in (False, True):
        trained, batch = build("llama", shape), batch_of(shape)
        optimizer = adamw(trained)
        options = {"memory_opt_unit": "layer", "memory_opt_release_gradients": is_released}
        engine = optimize(trained, optimizer=optimizer, memory_opt_engine="compile", memory_opt_level=1, **options)
        with deterministic():
            held = train(trained, batch, "bf16", optimizer, steps)
        weights[is_released] = {name: each.detach().clone() for name, each in trained.named_parameters()}
        peaks[is_released] = held.requested
        engine.detach()
    yield within(f"weights after {steps} steps", largest_error(weights[True], weights[False]), _BITWISE)
    yield Figure("peak, MiB", peaks[True] <= peaks[False], f"{peaks[True] / MIB:.1f}", f"{peaks[False] / MIB:.1f}")


def _checks() -> Iterator[Check]:
    yield Check("versions", versions)
    yield Check("memory marks", memory_marks)
    yield Check("cuDNN's attention", cudnn)
    yield Check("offload, delayed copies", delayed_copies, seconds=150)
    for model in MODELS:
        yield Check(f"gradients, {model}, aot_eager", functools.partial(gradients_without_compiler, model=model))
    yield Check("dropout", dropout)
    for model, dtype, plan in (
        ("roberta", "bf16", "level 1"),
        ("deberta-v2", "bf16", "level 1"),
        ("llama", "bf16", "level 1"),
        ("roberta", "fp32", "offload"),
        ("deberta-v2", "fp32", "level 1"),
        ("llama", "fp32", "level 2"),
        ("roberta", "bf16", "no plan"),
        ("llama", "bf16", "offload"),
        ("deberta-v2", "bf16", "offload"),
    ):
        run = functools.partial(gradients_by_inductor, model=model, dtype=dtype, plan=plan)
        yield Check(f"gradients, {model}, inductor, {dtype}, {plan}", run)
    yield Check("gradients, roberta, budget", gradients_under_a_budget, needs=("scipy",))
    yield Check("fp16 with GradScaler", scaled_fp16)
    yield Check("released gradients", released_gradients)
    for model in MODELS:
        for dtype in ("fp32", "bf16"):
            run = functools.partial(buffers, model=model, dtype=dtype)
            yield Check(f"buffers of operators, {model}, {dtype}", run)
    for model, dtype, rate, padding in (
        ("roberta", "fp32", 0.0, 8),
        ("roberta", "bf16", 0.1, 8),
        ("llama", "bf16", 0.0, 0),
        ("llama", "fp32", 0.0, 8),
        ("deberta-v2", "bf16", 0.0, 8),
    ):
        run = functools.partial(kernels, model=model, dtype=dtype, dropout=rate, padding=padding)
        yield Check(f"attention of {model}, {dtype}, dropout {rate}, padding {padding}", run)


CHECKS = tuple(_checks())
