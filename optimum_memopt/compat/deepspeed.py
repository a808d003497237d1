"""Parameters that DeepSpeed's ZeRO 3 has sharded (0.19)."""

import torch


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """That of all ranks' parts together, of which DeepSpeed's ZeRO 3 leaves none in the tensor (0.19, `zero.Init`)."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_sharded_by_deepspeed(model: torch.nn.Module) -> bool:
    """True for a model whose parameters ZeRO 3 has sharded (0.19)."""
    return any(hasattr(parameter, "ds_shape") for parameter in model.parameters())
