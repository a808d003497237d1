"""The private names of inductor that the compile engine uses: its compiler, and the programs that it writes.

Checked in torch 2.13.0 and present since 2.9, unless stated otherwise.
"""

import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.torch_compat.compiler_errors import DraftFailedError
from optimum_memopt.engines.torch_compat.kernels import inductor_patches
from optimum_memopt.errors import line_of


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: list[Any],
    partitioner: CustomPartitionerFn,
    wrap_backward: Callable[[Callable[..., Any]], Callable[..., Any]],
    saw: Callable[[fx.Graph, Any, bool], None] | None,
    is_draft: Callable[[], bool] = lambda: False,
) -> Callable:
    """Compile a traced graph with inductor (`torch/_inductor/compile_fx.py`).

    `custom_partitioner_fn` exists since 2.9 (pytorch PR 157711).

    Args:
        module: the traced graph.
        inputs: its inputs.
        partitioner: partitions the joint graph; its `uuid` is part of inductor's cache key.
        wrap_backward: takes the compiled backward, and returns the function to run instead.
        saw: called with each graph, the object that runs inductor's program for it (None: no Python program), and True
            for the backward. None: no programs are written, and the graphs run operator by operator.
        is_draft: called for each graph once it exists. If it returns True, no program is written, and a graph that
            fails to run raises DraftFailedError.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if saw is None:
            return make_boxed_func(module.forward)
        if is_draft():
            return _as_draft(fx_graph.run_operators(module, inputs))
        if "get_decomp_fn" in options:
            # A table of functions cannot be part of the cache key, but a function can, by its name (2.13).
            options["get_decomp_fn"] = _inductor_decompositions
        compiled = compile_fx_inner(module, inputs, **options)
        is_backward = bool(options.get("is_backward"))
        saw(module.graph, getattr(compiled, "compiled_fn_runner", None), is_backward)
        return wrap_backward(compiled) if is_backward else compiled

    passes = _HideSnapshots(inductor_config.joint_custom_pre_pass)
    patches = {"custom_partitioner_fn": partitioner, "joint_custom_pre_pass": passes, **inductor_patches()}
    # `compile_fx` returns something else than a function only for ahead-of-time compilation.
    compiled = compile_fx(
        module, inputs, compile_inner, config_patches=patches, decompositions=_inductor_decompositions()
    )
    return cast("Callable[..., Any]", compiled)


def _as_draft(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run_draft(args: list[Any]) -> Any:
        try:
            return run(args)
        except Exception as error:
            raise DraftFailedError(line_of(error)) from error

    return fx_graph.boxed(run_draft)


def _inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns inductor's decompositions without the one of an embedding's gradient, which PyTorch's kernel computes.

    inductor sums this gradient in float32 with atomic additions, and casts it afterwards. In half precision this takes
    three times the embedding gradient's memory, at the end of the backward, when all other gradients are held too
    (`embedding_dense_backward` in `torch/_decomp/decompositions.py`, 2.13). inductor itself uses the kernel on XPUs
    (`torch/_inductor/lowering.py`).
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback

    gradient = torch.ops.aten.embedding_dense_backward
    if gradient.default not in lowerings:
        make_fallback(gradient, warn=False, override_decomp=True)
    return {operator: each for operator, each in select_decomp_table().items() if operator != gradient.default}


class _HideSnapshots(CustomGraphPass):
    """Runs the pass `fx_graph.hide_snapshots` after passes that the user has set."""

    def __init__(self, of_user: Any) -> None:
        self._of_user = dynamo.tree_leaves([] if of_user is None else of_user)

    def __call__(self, graph: fx.Graph) -> None:
        for custom_pass in self._of_user:
            custom_pass(graph)
        fx_graph.hide_snapshots(graph)

    def uuid(self) -> Any:
        """Returns a cache id; None, which keeps the graph out of inductor's cache, if a pass of the user has none."""
        uuids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._of_user]
        return None if None in uuids else str(("snapshots", *uuids))


def silenced(runner: Any) -> Callable[..., Any]:
    """Returns the program of `runner` without its work: torch's operators allocate memory, kernels do nothing.

    `torch/_inductor/codegen/wrapper.py` writes the program: a class with the method `call`, whose globals are torch,
    C++ functions that allocate without the dispatcher, checks, and kernels.

    Raises:
        NotImplementedError: the program has another form.
    """
    if runner is None or getattr(runner, "partitions", None):
        raise NotImplementedError("a program that is not one Python function")
    program = type(runner).call
    names = program.__globals__
    silent = {
        name: _Silent()
        for name, value in names.items()
        if isinstance(value, types.BuiltinFunctionType) or type(value).__module__.startswith("torch._inductor.runtime")
    }
    memory = {name: _allocation(name) for name in names if name.startswith("empty_strided_")}

    def reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    stand_ins = {**silent, **memory, "reinterpret_tensor": reinterpreted}
    return types.FunctionType(program.__code__, {**names, **stand_ins}, program.__name__, program.__defaults__)


class _Silent:
    """Stands for a kernel or check, and does nothing. Returns its first argument, as `copy_if_misaligned` does for an
    aligned tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return next(iter(args), None)

    run = __call__


def _allocation(name: str) -> Callable[..., torch.Tensor]:
    device = name.removeprefix("empty_strided_").removesuffix("_pinned")

    def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate
