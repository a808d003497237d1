"""bitsandbytes' weights of 4 bits (0.50): those of a model without data, and what they hold beside their codes."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

# Weights of a block with one scale, and of a block of scales, which are quantized too (double quantization).
_BLOCK, _BLOCK_OF_SCALES = 64, 256
# The values that four bits and eight bits stand for.
_CODES, _CODES_OF_SCALES = 16, 256
_STATE = "quant_state"


def is_4bit(tensor: torch.Tensor) -> bool:
    """True for a weight of 4 bits, or a fake tensor in its place."""
    return getattr(tensor, _STATE, None) is not None


def statistics_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The scales and codes of a weight of 4 bits, which are no parameters and no buffers; none of another tensor."""
    if not is_4bit(tensor):
        return ()
    state = getattr(tensor, _STATE)
    held = (*vars(state).values(), *(vars(state.state2).values() if state.nested else ()))
    return tuple(each for each in held if isinstance(each, torch.Tensor))


def copy_state(tensor: torch.Tensor, other: torch.Tensor, memo: dict[int, Any]) -> None:
    """Give a tensor what makes another one a weight of 4 bits; `memo` as of `copy.deepcopy`, with other statistics."""
    if is_4bit(tensor):
        for name, value in vars(tensor).items():
            setattr(other, name, copy.deepcopy(value, memo))


def packing_of(config: Any) -> tuple[str, bool, torch.dtype] | None:
    """The kind, whether scales are quantized, and the dtype of products of a `BitsAndBytesConfig`, or of a model's
    config with one (a dict); None for what does not load weights of 4 bits."""
    from transformers import BitsAndBytesConfig

    if isinstance(config, Mapping) and config.get("quant_method") == "bitsandbytes":
        config = BitsAndBytesConfig.from_dict(dict(config))
    if not isinstance(config, BitsAndBytesConfig) or not config.load_in_4bit:
        return None
    return config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant, config.bnb_4bit_compute_dtype


def quantize_4bit(model: torch.nn.Module, kind: str, double: bool, compute: torch.dtype) -> None:
    """Give the products of a model on the meta device weights of 4 bits, as transformers loads them
    (`replace_with_bnb_linear`, 5.23): all but those of its output embeddings.

    Args:
        kind: `nf4` or `fp4`.
        double: scales are quantized, too.
        compute: the dtype of products.
    """
    import bitsandbytes

    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear or module is head:
            continue
        product = bitsandbytes.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=compute,
            compress_statistics=double,
            quant_type=kind,
            device="meta",
        )
        if module.bias is not None:
            product.bias = module.bias
        product.weight = _packed(module.weight, kind, double)
        product.quant_state = getattr(product.weight, _STATE)
        model.set_submodule(name, product.requires_grad_(False))
    # As the quantizer of transformers does; PEFT asks for it.
    vars(model)["is_loaded_in_4bit"] = True


def _packed(weight: torch.Tensor, kind: str, double: bool) -> torch.nn.Parameter:
    """A weight of 4 bits without data; sizes as in `bitsandbytes/functional.py`, `quantize_4bit`."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    blocks = -(-weight.numel() // _BLOCK)
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
        shape=weight.shape,
        code=torch.empty(_CODES, **meta),
        blocksize=_BLOCK,
        quant_type=kind,
        dtype=weight.dtype,
        offset=None if of_scales is None else torch.empty((), **meta),
        state2=of_scales,
    )
    return Params4bit(
        torch.empty(((weight.numel() + 1) // 2, 1), dtype=torch.uint8, device="meta"),
        quant_state=state,
        blocksize=_BLOCK,
        compress_statistics=double,
        quant_type=kind,
        bnb_quantized=True,
    )
