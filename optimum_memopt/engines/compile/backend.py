"""torch.compile's backend: AOTAutograd with this engine's partitioner, with and without a compiler behind it."""

import contextlib
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import fx

from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.memory.inductor_memory import InductorPrograms
from optimum_memopt.engines.compile.passes import dropout
from optimum_memopt.errors import MemOptError

COMPILERS = ("inductor", "aot_eager")
# Gets what will hold inductor's programs, the joint graph, its inputs, how many of its outputs are the forward's, and
# what else torch passes on.
Partition = Callable[
    [InductorPrograms, fx.GraphModule, Any, int, dict[str, Any]], tuple[fx.GraphModule, fx.GraphModule]
]

_compiling: ContextVar[Callable[..., tuple[fx.GraphModule, fx.GraphModule]]] = ContextVar("_compiling")


class _Partitioner(compat.CustomPartitionerFn):
    """What inductor is given; passes on to the partition function of the backend that compiles at the moment.

    It holds the plan's name alone: inductor copies it, and pickles it into the key of its cache, which is then the
    same for the same plan in every process.
    """

    def __init__(self, plan: str) -> None:
        self.plan = plan

    def __call__(self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Any:
        return _compiling.get()(joint, joint_inputs, num_fwd_outputs, others)

    def uuid(self) -> bytes:
        sources = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
        # Not in torch's own key: what was compiled to overwrite saved activations would be loaded to keep them.
        donates = str(compat.functorch_config.donated_buffer)
        return hashlib.sha256(b"".join([self.plan.encode(), donates.encode(), *sources])).digest()


class Backend:
    """A backend for `torch.compile` whose joint graphs go through `partition`.

    Args:
        compiler: one of `COMPILERS`.
        partition: splits a joint graph into forward and backward.
        plan: its name, for inductor's caches.
    """

    def __init__(self, compiler: str, partition: Partition, plan: str) -> None:
        self._compiler = compiler
        self._partition = partition
        self._partitioner = _Partitioner(plan)

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        programs = InductorPrograms()
        before = _compiling.set(functools.partial(self._partition, programs))
        try:
            if self._compiler == "inductor":
                compiled = compat.compile_with_inductor(module, inputs, self._partitioner, programs.add)
            else:
                compiled = compat.compile_without_compiler(module, inputs, self._partitioner, dropout.decompositions())
            return programs.counted(compiled)
        finally:
            _compiling.reset(before)


@contextlib.contextmanager
def configured() -> Iterator[None]:
    """torch's switches for the time of a call of a compiled forward, given back afterwards."""
    with contextlib.ExitStack() as stack:
        for change in compat.changes():
            stack.enter_context(change)
        yield


def default_compiler(device_type: str) -> tuple[str, str]:
    """The compiler to take where the user names none, and why.

    Args:
        device_type: of the model's parameters, as `cuda`.
    """
    if device_type in ("cpu", "meta"):
        return "aot_eager", "on a CPU inductor compiles for half a minute and more"
    if any(missing := missing_for(device_type)):
        return "aot_eager", "; ".join(missing)
    return "inductor", f"inductor works on {device_type}"


def check_compiler(compiler: str, device_type: str) -> None:
    """Refuse a compiler that is not there.

    Raises:
        MemOptError: inductor without what it compiles with.
    """
    lacking, command = missing_for(device_type)
    if compiler == "inductor" and lacking:
        raise MemOptError(
            f"--memory_opt_compiler inductor: {lacking}; {command}; or take --memory_opt_compiler aot_eager"
        )


def missing_for(device_type: str) -> tuple[str, str]:
    """What inductor lacks on a device and the command that gets it, both empty when nothing."""
    if not compat.inductor_works(device_type):
        if device_type == "cpu":
            return "there is no C++ compiler", "apt-get install g++  # or name one in CXX"
        return "there is no Triton", "pip install triton"
    # Both its C++ kernels and Triton's launchers are Python extensions.
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        version = "{}.{}".format(*sys.version_info)
        return "Python's headers (Python.h) are not there", f"apt-get install python{version}-dev"
    return "", ""
