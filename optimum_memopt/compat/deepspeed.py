"""Private names of DeepSpeed (0.19): parameters sharded by ZeRO 3."""

import torch


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Returns the unsharded shape of a parameter; ZeRO 3 leaves no elements in the tensor (0.19, `zero.Init`)."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_sharded_by_deepspeed(model: torch.nn.Module) -> bool:
    """True if ZeRO 3 has sharded the model's parameters (0.19)."""
    return any(hasattr(parameter, "ds_shape") for parameter in model.parameters())
