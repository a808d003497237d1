"""Finds patches that do not apply to the installed torch, transformers, PEFT, TRL, DeepSpeed and others."""

import torch

from optimum_memopt.engines.torch_compat import fully_shard, liger
from optimum_memopt.engines.torch_compat.attention import MASKS
from optimum_memopt.engines.torch_compat.expert_adapters import EXPERTS
from optimum_memopt.engines.torch_compat.fake_tensors import SIMULATED, VALUES
from optimum_memopt.engines.torch_compat.fused_lm_head import HEAD
from optimum_memopt.engines.torch_compat.host_masks import MOVED
from optimum_memopt.engines.torch_compat.int8_products import PRODUCTS
from optimum_memopt.engines.torch_compat.patches import Patch
from optimum_memopt.engines.torch_compat.trace_fixes import COLLECTED, LOSS_BY_NAME
from optimum_memopt.engines.torch_compat.zero3 import LINEAR, PARTITIONED
from optimum_memopt.errors import UnsupportedModelError

# Optional patches: without them a model still trains, with a less complete plan.
LESS = (MASKS, MOVED, COLLECTED, LOSS_BY_NAME, HEAD, EXPERTS, PRODUCTS, LINEAR, liger.LIGER, liger.LOSS)
PATCHES: tuple[Patch, ...] = (*LESS, SIMULATED, VALUES, fully_shard.SHARDED, PARTITIONED)


def what_is_less() -> tuple[str, ...]:
    """Returns a line for each optional patch that cannot apply here."""
    return tuple(filter(None, (patch.problem() for patch in LESS if patch.is_in_use)))


def check_for_ranks(model: torch.nn.Module, by_zero3: bool) -> None:
    """Raise UnsupportedModelError if a model's parameters are sharded, and the required patch cannot apply."""
    is_sharded = fully_shard.is_sharded(model)
    for patch, is_needed in ((fully_shard.SHARDED, is_sharded), (PARTITIONED, by_zero3)):
        if is_needed and (why := patch.problem()):
            raise UnsupportedModelError(why, f"install {patch.package} {patch.tested}")
