"""ZeRO 3: what a rank holds, by private names of DeepSpeed's `runtime/zero/` (0.19)."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optimum_memopt.engines.torch_compat.patches import Name, Patch
from optimum_memopt.errors import MemOptError

_FILES = "deepspeed.runtime.zero"
PARTITIONED = Patch(
    "parameters that ZeRO 3 partitions",
    "no plan under ZeRO 3",
    "deepspeed",
    since="0.18",
    tested="0.18 to 0.19",
    names=(
        Name(
            f"{_FILES}.stage3",
            "DeepSpeedZeroOptimizer_Stage3",
            mentions=(
                *("parameter_offload", "fp16_groups", "partition_count", "reduce_bucket_size", "zenflow"),
                *("communication_data_type", "gradient_accumulation_dtype", "all2all_process_group"),
                *("fp32_partitioned_groups_flat", "offload_optimizer", "offload_param"),
            ),
        ),
        Name(
            f"{_FILES}.parameter_offload",
            "DeepSpeedZeRoOffload",
            mentions=(
                *("_prefetch_bucket_sz", "_max_reuse_distance_in_numel", "_max_available_parameters_in_numel"),
                *("param_coordinator", "zero_quantized_weights"),
                *("def pre_sub_module_backward_function(", "def post_sub_module_backward_function("),
            ),
        ),
        Name(
            f"{_FILES}.partitioned_param_coordinator",
            "PartitionedParameterCoordinator",
            mentions=(
                *("__prefetch_bucket_sz", "__step_id", "__submodule_order", "__step_id_module_fetched_for"),
                "def is_record_trace(",
            ),
        ),
    ),
)
# A linear layer's backward checks whether its weight must be gathered, by an attribute whose value differs per layer
# (since 0.19.1). torch before 2.13 guards on the value, and compiles each layer separately.
LINEAR = Patch(
    "linear layers under ZeRO 3",
    "torch before 2.13 recompiles each layer under ZeRO 3",
    "deepspeed",
    since="0.18",
    tested="0.18 to 0.19",
    names=(Name(f"{_FILES}.linear", "is_zero_param", ("parameter",), instead="LinearFunctionForZeroStage3"),),
)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yields replacements in DeepSpeed's files for a forward whose graphs get gathered weights."""
    file = sys.modules.get(f"{_FILES}.linear")
    if hasattr(file, "is_zero_param"):
        yield file, "is_zero_param", lambda parameter: False


@dataclass(frozen=True)
class PartitionedParameter:
    """A parameter of which each rank holds a shard.

    Attributes:
        order: its DeepSpeed id, which orders parameters that are gathered together.
        shape: the shape of the whole parameter.
        share: the elements of one shard, including the padding of the last.
        dtype: the dtype in which it is stored and gathered.
        is_persistent: whether it stays gathered from step to step.
        reduced: its position in the order in which gradients are reduced; -1: it is not trained.
    """

    order: int
    shape: torch.Size
    share: int
    dtype: torch.dtype
    is_persistent: bool
    reduced: int


@dataclass(frozen=True)
class Partitioning:
    """A model whose parameters are partitioned. Numbers are elements.

    Attributes:
        ranks: the number of ranks that share the parameters.
        parameters: the parameters, by name in the model.
        prefetched: how many elements a module prefetches.
        reuse: parameters that are used again within this many elements stay gathered.
        live: the number of gathered elements at which prefetching stops.
        bucket: the gradient elements that are reduced together.
        computed: the dtype of gradients.
        reduced: the dtype in which gradients are reduced.
        accumulated: the dtype in which gradients are accumulated.
    """

    ranks: int
    parameters: Mapping[str, PartitionedParameter]
    prefetched: int
    reuse: int
    live: int
    bucket: int
    computed: torch.dtype
    reduced: torch.dtype
    accumulated: torch.dtype


def _optimizer_of(model: torch.nn.Module) -> Any:
    """Returns a model's DeepSpeed optimizer; None if DeepSpeed does not train it with stage 3."""
    return next((getattr(parameter, "_z3_optimizer", None) for parameter in model.parameters()), None)


def partitioning_of(model: torch.nn.Module) -> Partitioning | None:
    """Returns a model's partitioning; None if DeepSpeed does not train it with stage 3.

    Raises:
        MemOptError: the shards are on another device, or quantized.
    """
    if (optimizer := _optimizer_of(model)) is None:
        return None
    hooks = optimizer.parameter_offload
    options = {
        "offload_optimizer": optimizer.offload_optimizer,
        "offload_param": optimizer.offload_param,
        "zero_quantized_weights": hooks.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": hooks.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": optimizer.all2all_process_group,
        "zero_hpz_partition_size": optimizer.zero_hpz_partition_size > 1,
        "zenflow": optimizer.zenflow,
    }
    if used := [name for name, is_used in options.items() if is_used]:
        raise MemOptError(f"{used[0]} changes what the device holds")
    trained = [id(parameter) for group in optimizer.fp16_groups for parameter in group]
    places = {parameter: place for place, parameter in enumerate(trained)}
    return Partitioning(
        optimizer.partition_count,
        {
            name: _described(parameter, places.get(id(parameter), -1))
            for name, parameter in model.named_parameters(remove_duplicate=False)
        },
        hooks._prefetch_bucket_sz,
        hooks._max_reuse_distance_in_numel,
        hooks._max_available_parameters_in_numel,
        optimizer.reduce_bucket_size,
        optimizer.dtype,
        optimizer.communication_data_type,
        optimizer.gradient_accumulation_dtype,
    )


def _described(parameter: Any, reduced: int) -> PartitionedParameter:
    share = parameter.ds_tensor
    return PartitionedParameter(
        parameter.ds_id, parameter.ds_shape, share.ds_numel, share.dtype, parameter.ds_persist, reduced
    )


# Prefix of the coordinator's name-mangled attributes.
_OWN = "_PartitionedParameterCoordinator"


def gather_ahead(model: torch.nn.Module, elements: int) -> None:
    """Set the number of elements that each module prefetches; all ranks must call this at the same point of a step."""
    hooks = _optimizer_of(model).parameter_offload
    hooks._prefetch_bucket_sz = elements
    setattr(hooks.param_coordinator, f"{_OWN}__prefetch_bucket_sz", elements)


def forgetting(model: torch.nn.Module) -> Callable[[], None]:
    """Returns a function that makes DeepSpeed forget the modules that run from now on, for a forward that is rerun.

    Otherwise DeepSpeed's first step records their order twice, and the next step decides by it for good which
    parameters to release (`__params_to_release` is cached).
    """
    optimizer = _optimizer_of(model)
    if optimizer is None:
        return lambda: None
    coordinator = optimizer.parameter_offload.param_coordinator
    held = vars(coordinator)
    count = held[f"{_OWN}__step_id"]

    def forget() -> None:
        if coordinator.is_record_trace():
            del held[f"{_OWN}__submodule_order"][count:]
            for steps in held[f"{_OWN}__step_id_module_fetched_for"].values():
                while steps and steps[-1] >= count:
                    steps.pop()
            held[f"{_OWN}__step_id"] = count

    return forget


@contextlib.contextmanager
def gathered_again(leaf: torch.nn.Module) -> Iterator[None]:
    """Gather a leaf module around a forward that a backward recomputes.

    Uses the hooks of the module's own backward, which DeepSpeed records as a step of its order: with a forward's hooks
    inside a backward, it would count frozen parameters among those of the module whose backward has begun.
    """
    hooks = _optimizer_of(leaf).parameter_offload
    hooks.pre_sub_module_backward_function(leaf)
    try:
        yield
    finally:
        hooks.post_sub_module_backward_function(leaf)


def shards(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns this rank's shards of the partitioned parameters, by parameter name."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: parameter.ds_tensor for name, parameter in parameters if hasattr(parameter, "ds_tensor")}


def updated(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the flat tensors that the optimizer updates one by one; empty for a model that is not partitioned.

    Each update copies that tensor's gradients, so the largest tensor counts.
    """
    optimizer = _optimizer_of(model)
    return [] if optimizer is None else list(optimizer.fp32_partitioned_groups_flat)
