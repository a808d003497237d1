"""Private names of bitsandbytes (0.50): scales and codes of quantized weights, quantized weights without data, and
optimizers."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

# Number of weights that share a scale; number of scales that share one, with double quantization.
_BLOCK, _BLOCK_OF_SCALES = 64, 256
# Sizes of the code tables for 4-bit weights and 8-bit scales.
_CODES, _CODES_OF_SCALES = 16, 256
_STATE = "quant_state"
# Layers of 8 bits move their weight's codes and scales to the module's state in the first forward.
_FIRST_FORWARD, _STATE_OF_8_BITS = "init_8bit_state", "state"
_CODES_OF_8_BITS, _SCALES_OF_8_BITS = "CB", "SCB"
_MAY_PACK = "support_avx512bf16_for_cpu"


def is_4bit(tensor: torch.Tensor) -> bool:
    """True for a weight of 4 bits, or a fake tensor that replaces it."""
    return getattr(tensor, _STATE, None) is not None


def is_8bit_weight(tensor: torch.Tensor) -> bool:
    """True for a weight of 8 bits, or a fake tensor that replaces it."""
    return _SCALES_OF_8_BITS in vars(tensor)


def is_quantized(tensor: torch.Tensor) -> bool:
    """True for a weight of 4 or 8 bits."""
    return is_4bit(tensor) or is_8bit_weight(tensor)


def statistics_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the scales and codes that a quantized weight has as attributes, which are no parameters or buffers;
    empty for other tensors."""
    if is_4bit(tensor):
        return _statistics(getattr(tensor, _STATE))
    scales = vars(tensor).get(_SCALES_OF_8_BITS)
    return () if scales is None else (scales,)


def _statistics(state: Any) -> tuple[torch.Tensor, ...]:
    held = (*vars(state).values(), *(vars(state.state2).values() if state.nested else ()))
    return tuple(each for each in held if isinstance(each, torch.Tensor))


def named_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a model's buffers, and the scales and codes of its quantized weights, each once."""
    yield from model.named_buffers()
    for name, parameter in model.named_parameters():
        for place, each in enumerate(statistics_of(parameter)):
            yield f"{name}.{_STATE}.{place}", each
    for path, product in model.named_modules():
        if is_8bit(product) and (scales := getattr(product, _STATE_OF_8_BITS).SCB) is not None:
            yield f"{path}.{_STATE_OF_8_BITS}", scales
        if _has_gathered_weight(product):
            for place, each in enumerate(_statistics(getattr(product, _STATE))):
                yield f"{path}.{_STATE}.{place}", each


def _has_gathered_weight(product: Any) -> bool:
    """True for a linear layer whose 4-bit weight FSDP2 shards: the module has scales, the gathered weight has none."""
    if getattr(product, _STATE, None) is None:
        # Do not read the weight: a parametrized one is computed at each access, with different results
        # (`torch.nn.utils.parametrize`).
        return False
    weight = getattr(product, "weight", None)
    return weight is not None and not is_4bit(weight)


def states_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Yields each module that itself holds scales and codes, the attribute's name, and its value."""
    for module in model.modules():
        name = _STATE if _has_gathered_weight(module) else _STATE_OF_8_BITS if is_8bit(module) else ""
        if name:
            yield module, name, getattr(module, name)


def is_8bit(module: torch.nn.Module) -> bool:
    """True for a linear layer with a weight of 8 bits."""
    return hasattr(module, _FIRST_FORWARD)


def move_to_state(product: Any) -> None:
    """Move the scales of a weight of 8 bits to the module's state, as its first forward does."""
    if getattr(product.weight, "CB", None) is not None:
        getattr(product, _FIRST_FORWARD)()


def gathered_products(model: torch.nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yields class, attribute and replacement of `Linear4bit.forward` under FSDP2: a forward that torch can trace.

    bitsandbytes' own forward puts a new parameter into the module (`fix_4bit_weight_quant_state_from_module`).
    """
    for kind in {type(product) for product in model.modules() if _has_gathered_weight(product)}:
        yield kind, "forward", _forward_of_gathered


def _forward_of_gathered(product: Any, given: torch.Tensor) -> torch.Tensor:
    """Compute what `Linear4bit.forward` does in training."""
    from bitsandbytes import matmul_4bit

    if not product.compute_type_is_set:
        product.set_compute_type(given)
        product.compute_type_is_set = True
    dtype = given.dtype if product.compute_dtype is None else product.compute_dtype
    bias = None if product.bias is None else product.bias.to(dtype)
    result: torch.Tensor = matmul_4bit(given.to(dtype), product.weight, bias=bias, quant_state=product.quant_state)
    return result.to(given.dtype)


def buffers_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the tensors of `named_buffers`."""
    return [buffer for _, buffer in named_buffers(model)]


def copy_state(tensor: torch.Tensor, other: torch.Tensor, memo: dict[int, Any]) -> None:
    """Copy the attributes that make `tensor` a quantized weight to `other`.

    Args:
        memo: as of `copy.deepcopy`; maps scales and codes to their replacements.
    """
    if is_quantized(tensor):
        for name, value in vars(tensor).items():
            # The codes of 8 bits are the weight itself.
            is_weight = name == _CODES_OF_8_BITS and value is not None
            setattr(other, name, other.detach() if is_weight else copy.deepcopy(value, memo))


def optimizer_kind(optimizer: Any) -> tuple[str, int, frozenset[int]]:
    """Returns the update rule of a bitsandbytes optimizer (`adam`, `lion`), the bits of its states, and the ids of
    parameters with 32-bit states; an empty rule for other optimizers."""
    rule, args, manager = (getattr(optimizer, name, None) for name in ("optimizer_name", "args", "mng"))
    if not any(base.__module__.startswith("bitsandbytes.optim.") for base in type(optimizer).__mro__) or not rule:
        return "", 0, frozenset()
    # Trainer registers all embeddings.
    overridden = (
        id(getattr(module, name))
        for module, name, config in getattr(manager, "module_weight_config_triple", ())
        if config.get("optim_bits") == 32
    )
    return rule, getattr(args, "optim_bits", 32), frozenset(overridden)


def loads_quantized(config: Any) -> "BitsAndBytesConfig | None":
    """Returns the `BitsAndBytesConfig` passed to `from_pretrained` or stored in a model's config; None if it does not
    load weights of 4 or 8 bits."""
    from transformers import BitsAndBytesConfig

    if isinstance(config, Mapping) and config.get("quant_method") == "bitsandbytes":
        config = BitsAndBytesConfig.from_dict(dict(config))
    if not isinstance(config, BitsAndBytesConfig):
        return None
    is_frozen = config.load_in_4bit or (config.load_in_8bit and not config.llm_int8_has_fp16_weight)
    return config if is_frozen else None


def quantize(model: Any, config: "BitsAndBytesConfig") -> None:
    """Quantize a model on the meta device where transformers does (5.0 to 5.24): all linear layers except the head and
    the modules that the config skips."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    before = dict(model.named_modules())
    in_float32 = getattr(model, "_keep_in_fp32_modules", None)
    left_out = HfQuantizer.get_modules_to_not_convert(model, config.llm_int8_skip_modules, in_float32)
    replace_with_bnb_linear(model, modules_to_not_convert=left_out, quantization_config=config)
    for name, product in model.named_modules():
        if isinstance(product, Linear4bit):
            product.weight = _packed(product.weight.shape, before[name].weight.dtype, config)
            product.quant_state = getattr(product.weight, _STATE)
            product.bias = before[name].bias
        elif isinstance(product, Linear8bitLt):
            product.weight = _in_8_bits(product.weight.shape)
            product.bias = before[name].bias
    # transformers' quantizer sets it; PEFT reads it.
    vars(model)["is_loaded_in_4bit" if config.load_in_4bit else "is_loaded_in_8bit"] = True


def moved_to_states(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, bool, torch.nn.Parameter]]:
    """Yields the tensors in the states of a model's 8-bit layers, whether each is the weight's codes, and the
    weight."""
    for module in filter(is_8bit, model.modules()):
        for name, value in vars(getattr(module, _STATE_OF_8_BITS)).items():
            if isinstance(value, torch.Tensor):
                yield value, name == _CODES_OF_8_BITS, cast(Any, module).weight


def _in_8_bits(shape: torch.Size) -> torch.nn.Parameter:
    """Returns a weight of 8 bits without data."""
    from bitsandbytes.nn import Int8Params

    codes = torch.empty(shape, dtype=torch.int8, device="meta")
    scales = torch.empty(shape[0], dtype=torch.float32, device="meta")
    return Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)


def cast_biases(model: torch.nn.Module) -> None:
    """Cast the biases of 4-bit linear layers to their compute dtype, as the first forward does."""
    from bitsandbytes.nn import Linear4bit

    for product in model.modules():
        if isinstance(product, Linear4bit) and product.bias is not None:
            product.bias.data = product.bias.data.to(product.compute_dtype)


def keep_unpacked(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Prevent evaluations on a CPU with AVX512-BF16 from packing weights of 4 bits, and unpack packed weights.

    Weights would stay packed, and the product with a packed weight has no backward: later steps would get wrong
    gradients, with only a warning from torch (0.50, `Linear4bit.forward` in `bitsandbytes/nn/modules.py`). Scales of
    unpacked weights are rounded to bfloat16.

    Returns:
        The modules, for `allow_packing`.
    """
    held: list[Any] = [module for module in model.modules() if getattr(module, _MAY_PACK, False)]
    for module in held:
        setattr(module, _MAY_PACK, False)
        if getattr(getattr(module.weight, _STATE, None), "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

            unpacked = _convert_weight_packed_for_cpu_inverse(module.weight.data, module.weight.quant_state)
            module.weight.data, module.weight.quant_state = unpacked
    return held


def allow_packing(held: Iterable[torch.nn.Module]) -> None:
    """Undo `keep_unpacked`."""
    for module in held:
        setattr(module, _MAY_PACK, True)


def _packed(shape: torch.Size, dtype: torch.dtype, config: "BitsAndBytesConfig") -> torch.nn.Parameter:
    """Returns a weight of 4 bits without data; sizes as in `bitsandbytes/functional.py`, `quantize_4bit`.

    Args:
        dtype: the dtype before it is quantized.
    """
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    kind, double, storage = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_storage
    blocks = -(-shape.numel() // _BLOCK)
    meta: dict[str, Any] = {"dtype": torch.float32, "device": "meta"}
    scales, of_scales = torch.empty(blocks, **meta), None
    if double:
        scales = torch.empty(blocks, dtype=torch.uint8, device="meta")
        of_scales = QuantState(
            torch.empty(-(-blocks // _BLOCK_OF_SCALES), **meta),
            code=torch.empty(_CODES_OF_SCALES, **meta),
            blocksize=_BLOCK_OF_SCALES,
            dtype=torch.float32,
        )
    state = QuantState(
        scales,
        shape=shape,
        code=torch.empty(_CODES, **meta),
        blocksize=_BLOCK,
        quant_type=kind,
        dtype=dtype,
        offset=None if of_scales is None else torch.empty((), **meta),
        state2=of_scales,
    )
    return Params4bit(
        torch.empty(((shape.numel() + 1) // (2 * storage.itemsize), 1), dtype=storage, device="meta"),
        quant_state=state,
        blocksize=_BLOCK,
        compress_statistics=double,
        quant_type=kind,
        quant_storage=storage,
        bnb_quantized=True,
    )
