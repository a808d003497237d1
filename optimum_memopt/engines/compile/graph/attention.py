"""Which kernels compute a graph's attention. Pure."""

from collections.abc import Iterable

from torch import fx

from optimum_memopt.engines.compile.torch_compat import dynamo

# ATen's operators, in the order in which they are told.
_KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
}


def fused_attention(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The fused kernels among a graph's operators, by their names in PyTorch's documentation."""
    names = {dynamo.operator_name(node.target) for node in nodes}
    return tuple(dict.fromkeys(kernel for operator, kernel in _KERNELS.items() if operator in names))
