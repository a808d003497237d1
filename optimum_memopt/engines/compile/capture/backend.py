"""torch.compile's backend: AOTAutograd with this engine's partitioner, with and without a compiler behind it."""

import contextlib
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.partition import dropout
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.torch_compat import dynamo, inductor, kernels
from optimum_memopt.errors import MemOptError


class _Partitioner(dynamo.CustomPartitionerFn):
    """Partitions one joint graph; its key in inductor's cache is the key of the choice.

    inductor calls `uuid` for the key of each graph that it compiles (`torch/_inductor/codecache.py`,
    `FxGraphHashDetails`, 2.13). Forward and backward are compiled after the joint graph was partitioned, so the choice
    is known by then. Graphs without a backward are never partitioned and depend on no choice. AOTAutograd's own cache
    would ask before it traces, when there is no choice yet, and is therefore off (`dynamo.configured`).
    """

    def __init__(self, partition: Callable[..., tuple[Choice, Modules]], key: str = "") -> None:
        self._partition = partition
        self._key = key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Modules:
        choice, modules = self._partition(gm, joint_inputs, options.pop("num_fwd_outputs"), options)
        self._key = choice.key
        return modules

    def uuid(self) -> bytes:
        sources = (path.read_bytes() for path in sorted(Path(__file__).parents[2].rglob("*.py")))
        # Missing in torch's own key: code that overwrites saved activations would be loaded for graphs that keep them.
        donates = str(dynamo.functorch_config.donated_buffer)
        return hashlib.sha256(b"".join([self._key.encode(), donates.encode(), *sources])).digest()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Partitioner":
        """Returns itself: inductor may copy its configuration before the choice is known."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the key alone: inductor pickles its configuration into the key of its cache."""
        return _Partitioner, (_cannot_partition, self._key)


def _cannot_partition(*joint: Any) -> tuple[Choice, Modules]:
    raise NotImplementedError("a pickled partitioner only has the key of its choice")


def compile_graph(
    compiler: str,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[[fx.GraphModule, Any, int, dict[str, Any]], tuple[Choice, Modules]],
    wrap_backward: Callable[[Callable[..., Any]], Callable[..., Any]],
    on_graph: Callable[[fx.Graph, Any, bool], None] | None,
    log: Callable[[str], None],
    is_draft: Callable[[], bool] = lambda: False,
) -> Callable[..., Any]:
    """Compile a graph traced by dynamo.

    Args:
        inputs: inputs that it was traced with.
        partition: takes the joint graph, its inputs, the number of its outputs that are the forward's, and torch's
            other arguments.
        wrap_backward: takes the compiled backward, and returns the function that runs in its place.
        on_graph, is_draft: see `inductor.compile_with_inductor`.
        log: logs a line.
    """
    inputs, partitioner = dynamo.of_trace(inputs), _Partitioner(partition)
    with contextlib.ExitStack() as stack:
        if line := kernels.cudnn_attention_warning(module.graph):
            log(line)
            stack.enter_context(kernels.without_cudnn_attention())
        if compiler == "inductor":
            return inductor.compile_with_inductor(module, inputs, partitioner, wrap_backward, on_graph, is_draft)
        return dynamo.compile_without_compiler(module, inputs, partitioner, wrap_backward, dropout.decompositions())


def default_compiler(device_type: str) -> tuple[str, str]:
    """Returns the compiler to use if the user names none, and why."""
    if device_type in ("cpu", "meta"):
        return "aot_eager", "inductor takes half a minute or more to compile on a CPU"
    if any(missing := missing_for(device_type)):
        return "aot_eager", "; ".join(missing)
    return "inductor", f"inductor works on {device_type}"


def check_compiler(compiler: str, device_type: str) -> None:
    """Raise MemOptError if inductor is requested and lacks something on this device."""
    lacking, command = missing_for(device_type)
    if compiler == "inductor" and lacking:
        raise MemOptError(
            f"--memory_opt_compiler inductor: {lacking}; {command}; or use --memory_opt_compiler aot_eager"
        )


def missing_for(device_type: str) -> tuple[str, str]:
    """Returns what inductor lacks for a device and the command that installs it; both empty if it lacks nothing."""
    if not dynamo.inductor_works(device_type):
        if device_type == "cpu":
            return "there is no C++ compiler", "apt-get install g++  # or set CXX"
        return "Triton is not installed", "pip install triton"
    if device_type == "cuda" and not kernels.triton_has_a_compiler():
        return "there is no C compiler, which Triton needs", "apt-get install gcc  # or set CC"
    # Both its C++ kernels and Triton's launchers are Python extensions.
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        version = "{}.{}".format(*sys.version_info)
        return "Python's headers (Python.h) are missing", f"apt-get install python{version}-dev"
    return "", ""
