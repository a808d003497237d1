"""torch.compile's backend: AOTAutograd with this engine's partitioner, with and without a compiler behind it."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import compat, dropout

COMPILERS = ("inductor", "aot_eager")
# Gets the joint graph, its inputs, how many of its outputs are the forward's, and what else torch passes on.
Partition = Callable[[fx.GraphModule, Any, int, dict[str, Any]], tuple[fx.GraphModule, fx.GraphModule]]

# inductor copies and pickles its configuration, the partitioner in it too: it holds a key of these.
_partitions: dict[str, Partition] = {}


class _Partitioner(compat.CustomPartitionerFn):
    """What inductor is given; finds its function by key, which a copy or a pickle keeps."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Any:
        return _partitions[self.key](joint, joint_inputs, num_fwd_outputs, others)

    def uuid(self) -> bytes:
        sources = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
        return hashlib.sha256(b"".join([self.key.encode(), *sources])).digest()


class Backend:
    """A backend for `torch.compile` whose joint graphs go through `partition`.

    Args:
        compiler: one of `COMPILERS`.
        partition: splits a joint graph into forward and backward.
        key: names the plan, for inductor's caches.
    """

    def __init__(self, compiler: str, partition: Partition, key: str) -> None:
        self._compiler = compiler
        self._partitioner = _Partitioner(f"{id(self)} {key}")
        _partitions[self._partitioner.key] = partition

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self._compiler == "inductor":
            return compat.compile_with_inductor(module, inputs, self._partitioner)
        return compat.compile_without_compiler(module, inputs, self._partitioner, dropout.decompositions())

    def close(self) -> None:
        """Forget the partition function; the compiled graphs live on."""
        _partitions.pop(self._partitioner.key, None)


@contextlib.contextmanager
def configured() -> Iterator[None]:
    """torch's switches for the time of a call of a compiled forward, given back afterwards."""
    with contextlib.ExitStack() as stack:
        for change in compat.changes():
            stack.enter_context(change)
        yield


def has_compiler() -> bool:
    """Whether inductor finds what it compiles with: Triton on CUDA, a C++ compiler elsewhere."""
    return compat.inductor_works(torch.cuda.is_available())
