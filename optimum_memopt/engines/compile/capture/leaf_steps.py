"""Steps of a model whose layers are leafs of ZeRO 3, run on fake tensors around its layers, with any batch."""

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from optimum_memopt.compat import full_shape
from optimum_memopt.engines.compile.graph.symbols import input_sizes
from optimum_memopt.engines.compile.memory.live import loss_of
from optimum_memopt.engines.compile.memory.zero3 import Repeats, Steps, steps_around
from optimum_memopt.engines.compile.torch_compat import dynamo, fake_tensors
from optimum_memopt.engines.compile.torch_compat.zero3 import Partitioning
from optimum_memopt.errors import MemOptError, line_of

# Batches of different sizes whose steps are kept.
_MOST_STEPS = 64


class LeafSteps:
    """Runs a step for each batch that is asked for, once.

    Args:
        forward: the model's own, of positional arguments and those by keyword.
        args, inputs: of the first batch.
        layers: paths of the leaf modules.
        compiled: those whose graphs are known.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        inputs: Mapping[str, Any],
        partitioning: Partitioning,
        layers: Collection[str],
        compiled: Collection[str],
    ) -> None:
        self._model, self._forward, self._partitioning = weakref.ref(model), forward, partitioning
        self._layers, self._compiled = layers, compiled
        self._mode = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
        self._first = input_sizes(inputs)
        self._args, self._inputs = dynamo.tree_map(self._fake, (args, dict(inputs)))
        self._of_sizes = functools.lru_cache(_MOST_STEPS)(self._run)

    def __call__(self, sizes: Mapping[str, int], prefetched: int, repeats: Repeats = ()) -> Steps:
        """The steps with a batch; what `sizes` does not name is as large as in the first batch, or has grown with a
        size that it was equal to.

        Args:
            prefetched: elements that each module has gathered ahead.
            repeats: nothing of it runs again where it is empty.

        Raises:
            MemOptError: the model cannot be run on fake tensors.
        """
        named = frozenset((name, size) for name, size in sizes.items() if name in self._first)
        return self._of_sizes(named, prefetched, repeats if any(repeats) else ())

    def _run(self, named: frozenset[tuple[str, int]], prefetched: int, repeats: Repeats) -> Steps:
        model, sizes, partitioning = self._model(), dict(named), replace(self._partitioning, prefetched=prefetched)
        if model is None:
            raise ReferenceError("the model whose steps are predicted was deleted")
        grown = {(name.rpartition("_")[2], self._first[name]): size for name, size in sizes.items()}
        layers = {path: model.get_submodule(path) for path in self._layers}
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), fake_tensors.without_hooks(model), self._mode:
            inputs = {name: self._resized(name, value, sizes, grown) for name, value in self._inputs.items()}

            def loss() -> torch.Tensor:
                return loss_of(self._forward(self._args, inputs))

            try:
                with fake_tensors.replaced([model], self._fakes), fake_tensors.run_as_eager():
                    return steps_around(model, loss, partitioning, layers, self._compiled, repeats)
            except MemOptError:
                raise
            except Exception as error:
                raise MemOptError(
                    f"what runs outside of the layers of {type(model).__name__} cannot be run on tensors without data "
                    f"({line_of(error)})"
                ) from error

    def _fakes(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        known = {id(tensor): tensor for tensor in tensors}
        fakes = {number: self._fake(tensor) for number, tensor in known.items()}
        return [fakes[id(tensor)] for tensor in tensors]

    def _fake(self, value: Any) -> Any:
        """A tensor without data; of a parameter the whole, and a new one each time."""
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, torch.nn.Parameter):
            return self._mode.from_tensor(value, static_shapes=True)
        with self._mode:
            whole = torch.empty(full_shape(value), dtype=value.dtype, device=value.device)
        return torch.nn.Parameter(whole, value.requires_grad)

    def _resized(
        self, name: str, value: object, sizes: Mapping[str, int], grown: Mapping[tuple[str, int], int]
    ) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        named = [(f"dim{dim}", size) for dim, size in enumerate(value.shape)]
        shape = [sizes.get(f"{name}_{dim}", grown.get((dim, size), size)) for dim, size in named]
        resized = value if shape == list(value.shape) else value.new_empty(shape)
        if name.endswith("attention_mask"):
            fake_tensors.with_padding(resized)
        return resized
