"""Runs a model's forwards and backwards on fake tensors as Trainer does, without an engine."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils.operations import convert_to_fp32

from optimum_memopt.compat.transformers import checkpoint_layers, is_mask
from optimum_memopt.engines.api.predictions import EagerSettings
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.simulator.live_run import BACKWARD, FORWARD, LiveRun
from optimum_memopt.engines.simulator.recorder import LiveRecorder, loss_of
from optimum_memopt.engines.torch_compat import fake_tensors
from optimum_memopt.engines.torch_compat.compiler_errors import line_with_place
from optimum_memopt.engines.torch_compat.kernels import Multiprocessors
from optimum_memopt.errors import MemOptError


def run_micro_batches(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    autocast: torch.dtype | None,
    settings: EagerSettings,
    cuda: Multiprocessors | None,
    count: int = 1,
    *,
    args: Sequence[Any] = (),
    accumulated: Collection[str] = (),
    inspect_at: int = -1,
    records_work: bool = False,
) -> LiveRun:
    """Run forward and backward of a model on fake tensors as Trainer does; the caller has entered their mode.

    Args:
        batch: keyword arguments of the forward; `args` are the positional ones.
        accumulated: names of the parameters that have gradients of earlier micro-batches.
        inspect_at: see `LiveRecorder`.
        records_work: record the calls of the first micro-batch in `LiveRun.calls`.

    Raises:
        MemOptError: the model reads values of its tensors, or fails.
    """
    device = next(model.parameters()).device.type
    if settings.checkpoints:
        checkpoint_layers(model, settings.checkpoints)
    for name, value in batch.items():
        if is_mask(name) and isinstance(value, torch.Tensor):
            fake_tensors.with_mask(value, has_padding=True)
    recorder = LiveRecorder(model, cuda, inspect_at)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.empty_like(parameter) if name in accumulated else None
    try:
        with fake_tensors.run_as_eager(), recorder:
            recorder.hold_step({name: each for name, each in batch.items() if isinstance(each, torch.Tensor)})
            for place in range(count):
                recorder.records_work = records_work and not place
                recorder.begin(FORWARD)
                holds_cache = settings.keeps_outputs and not settings.checkpoints
                inputs = dict(batch) if holds_cache else without_key_value_cache(model, args, batch)
                with torch.autocast(device, autocast, enabled=autocast is not None):
                    outputs = model(*args, **inputs)
                if autocast is not None:
                    # As accelerate's `ConvertOutputsToFp32` (1.15, `utils/operations.py`).
                    outputs = convert_to_fp32(outputs)
                recorder.outputs("outputs", outputs)
                loss = loss_of(outputs)
                recorder.begin(FORWARD)
                if not settings.keeps_outputs:
                    outputs = None
                recorder.begin(BACKWARD)
                loss.backward()
                del outputs, loss
    except MemOptError:
        raise
    except Exception as error:
        raise MemOptError(
            f"{type(model).__name__} cannot be run on tensors without data ({line_with_place(error)})"
        ) from error
    return recorder.run()
