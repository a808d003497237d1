"""Names for the operators of a forward that are the same in every process that traces the model. Pure."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import fx

from optimum_memopt.engines.compile.analysis.joint import JointGraph, is_tensor, is_view, tensor_value
from optimum_memopt.engines.compile.analysis.saved_activations import is_output, layer_of, module_path, operator_name
from optimum_memopt.plans.plan_file import GraphSignature

# The layer, "" outside of all, and the path in it.
Path = tuple[str, str]


def node_paths(joint: JointGraph) -> dict[fx.Node, Path]:
    """Layer and path in it of each operator that allocates, in graph order: `encoder.layer.0`, `output.dense/addmm`.

    What a module calls several times gets `#2` and so on, an output of an operator that has several its number:
    `norm/native_layer_norm[0]`. Views and sizes have no path, since they come and go with symbolic sizes.
    """
    seen: Counter[Path] = Counter()
    paths: dict[fx.Node, Path] = {}
    for node in joint.forward:
        if node.op != "call_function" or is_view(node) or not is_tensor(node):
            continue
        layer = layer_of(node)
        # A layer that is called again ends in the number of the call.
        module = module_path(node).removeprefix(layer.partition("@")[0]).lstrip(".")
        output = f"[{node.args[1]}]" if is_output(node) else ""
        path = layer, f"{module}/{operator_name(node)}{output}"
        seen[path] += 1
        paths[node] = path if seen[path] == 1 else (layer, f"{path[1]}#{seen[path]}")
    return paths


def signature_of(paths: Mapping[fx.Node, Path], parameters: Iterable[fx.Node]) -> GraphSignature:
    """What tells a graph from another one, whatever the sizes of the batch.

    Args:
        paths: see `node_paths`.
        parameters: inputs that stay from step to step, buffers among them.
    """
    numbers: dict[str, tuple[int, int]] = {}
    for node in parameters:
        tensor = tensor_value(node)
        # A buffer may grow with the batch.
        if all(isinstance(size, int) for size in tensor.shape):
            dtype = str(tensor.dtype).removeprefix("torch.")
            count, sum_of_numbers = numbers.get(dtype, (0, 0))
            numbers[dtype] = count + 1, sum_of_numbers + tensor.numel()
    text = "\n".join(f"{layer} {path}" for layer, path in paths.values())
    return GraphSignature(
        numbers, dict(Counter(map(operator_name, paths))), hashlib.sha256(text.encode()).hexdigest()[:16]
    )
