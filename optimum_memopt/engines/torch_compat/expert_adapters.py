"""LoRA on a parameter that is not a module's weight, such as the fused experts of transformers 5 (PEFT 0.18 to 0.21),
without parametrizations.

PEFT wraps the module and registers a parametrization of the parameter in each forward: it makes a module and changes
the class of another (`ParamWrapper._activate_lora` in `peft/tuners/lora/layer.py`), which breaks the graph. Here the
module is called with the adapted weight in place of the parameter, which computes the same.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from optimum_memopt.engines.torch_compat.fake_tensors import Replacement
from optimum_memopt.engines.torch_compat.patches import Name, Patch

_LAYERS, _WRAPPER = "peft.tuners.lora.layer", "ParamWrapper"
EXPERTS = Patch(
    "PEFT's adapters of experts",
    "PEFT's adapters of experts break the graph of each layer",
    "peft",
    since="0.18",
    tested="0.21",
    names=(
        Name(_LAYERS, f"{_WRAPPER}.forward", ("self", "x")),
        Name(_LAYERS, f"{_WRAPPER}._check_forward_args", ("self", "x")),
        Name(_LAYERS, f"{_WRAPPER}._activate_lora", ("self", "active_adapters")),
        Name(_LAYERS, f"{_WRAPPER}.get_delta_weight", ("self", "adapter_name")),
        Name(_LAYERS, f"{_WRAPPER}.get_param"),
    ),
)


def replacements() -> Iterator[Replacement]:
    """Yields a replacement for the forward of PEFT's parameter wrapper; none if PEFT is not imported or does not
    match."""
    if not EXPERTS.applies:
        return
    wrapper = getattr(sys.modules[_LAYERS], _WRAPPER)
    # Another thread that trains may have replaced it.
    yield wrapper, "forward", _without_parametrizations(inspect.unwrap(wrapper.forward))


def _without_parametrizations(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def adapted_forward(wrapper: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        is_adapted = adapters and not (wrapper.disable_adapters or wrapper.merged)
        # PEFT adds to 8-bit weights in another dtype, and refuses adapters per row.
        is_plain = wrapper.get_param().dtype.itemsize > 1 and kwargs.get("adapter_names") is None
        if not (torch.compiler.is_compiling() and is_adapted and is_plain):
            return forward(wrapper, x, *args, **kwargs)
        wrapper._check_forward_args(x, *args, **kwargs)
        # Each parameter of a module has its own wrapper around the previous parameter's.
        path, module = wrapper.parameter_name, wrapper.base_layer
        while isinstance(module, type(wrapper)):
            path, module = f"base_layer.{path}", module.base_layer
        weight = {path: _adapted(wrapper, adapters)}
        return torch.func.functional_call(wrapper.base_layer, weight, (x, *args), kwargs, tie_weights=False)

    return adapted_forward


def _adapted(wrapper: Any, adapters: list[str]) -> torch.Tensor:
    parameter: torch.Tensor = wrapper.get_param()
    # Since 0.21 the product of the two factors need not be materialized.
    if len(adapters) == 1 and wrapper.num_experts > 1 and hasattr(wrapper, "get_delta_factors"):
        left, right, scaling = wrapper.get_delta_factors(adapters[0])
        with torch.autocast(parameter.device.type, enabled=False):
            return torch.baddbmm(parameter, left, right, alpha=scaling)
    first, *others = (wrapper.get_delta_weight(name) for name in adapters)
    return parameter + sum(others, first)
