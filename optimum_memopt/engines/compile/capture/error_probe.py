"""Measures the error of activations saved in fp8, once, in the first batch.

A compiled graph saves the fp8 values, and the exact ones may never be in memory. So the operators of the forward run
once more, one by one and without saving anything, and each activation is compared with its value converted back from
fp8. `gradient_probe.py` measures the error of the gradients.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import compressions
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.strategies.compress import saved_names
from optimum_memopt.engines.torch_compat import fx_graph
from optimum_memopt.generators import preserved_generators
from optimum_memopt.logs import best_effort


@dataclass(frozen=True, eq=False)
class RelativeError:
    """The error of an activation, or of a graph's gradients, in the Euclidean norm.

    Attributes:
        layer: path of the layer; empty outside of layers.
        path: path of the activation; empty for gradients.
        sums: sums of the squared differences and of the squared exact values: a tensor of two numbers.
    """

    layer: str
    path: str
    sums: torch.Tensor

    @property
    def relative(self) -> float:
        """Returns the relative error; NaN if a value is not finite."""
        error, whole = self.sums.tolist()
        return 0.0 if whole == 0 else (error / whole) ** 0.5


@dataclass(frozen=True, eq=False)
class ErrorProbe:
    """Measures the error of the activations that one graph compresses.

    Attributes:
        run: takes a list of arguments, which it empties, and returns `RelativeError.sums` of each activation.
        places: positions of the graph's arguments that `run` takes.
        paths: layer (empty outside of layers) and path in it of each activation.
    """

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    places: tuple[int, ...]
    paths: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, forward: fx.GraphModule, graph: AnalyzedGraph, choice: Choice) -> "ErrorProbe | None":
        """Returns the probe of a partitioned forward, which it copies; None if nothing is compressed, or the forward
        has an argument that the traced graph does not have."""
        roots = [candidate.activation.root for candidate in compressions(choice.candidates)]
        if not roots:
            return None
        probed = copy.deepcopy(forward.graph)
        places = [fx_graph.input_position(node) for node in probed.find_nodes(op="placeholder")]
        known = tuple(place for place in places if place is not None)
        if len(known) < len(places):
            return None
        nodes = {node.name: node for node in probed.nodes}
        (output,) = probed.find_nodes(op="output")
        with probed.inserting_before(output):
            sums = [
                probed.call_function(_sums, tuple(nodes[name] for name in (root.name, *saved_names(root.name))))
                for root in roots
            ]
            probed.output(sums)
        probed.erase_node(output)
        fx_graph.remove_unread_writes(probed)
        fx_graph.remove_dead_code(probed, lambda node: False)
        run = fx_graph.run_operators(fx.GraphModule(forward, probed), ())
        return cls(run, known, tuple(graph.paths.get(root, ("", root.name)) for root in roots))

    def errors(self, args: Sequence[Any], layer: str) -> list[RelativeError]:
        """Measure the errors of one run of the graph; random generators are restored.

        Args:
            layer: path of the layer that runs the graph; empty: `paths` have the layers.
        """
        found: list[RelativeError] = []
        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda), None)
        with (
            best_effort("the error of what is saved in fp8"),
            preserved_generators(device),
            torch.no_grad(),
            fx_graph.without_modes_and_autocast(),
        ):
            sums = self.run([args[place] for place in self.places])
            found = [
                RelativeError(layer or own, path, each) for (own, path), each in zip(self.paths, sums, strict=True)
            ]
        return found


def _sums(exact: torch.Tensor, in_fp8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    exact = exact.to(torch.float32)
    return squares(in_fp8.to(torch.float32).mul_(scale).sub_(exact), exact)


def squares(difference: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Returns `RelativeError.sums`; `difference` is overwritten."""
    return torch.stack([difference.square_().sum(), exact.square().sum()])


def mean_and_worst(errors: Sequence[RelativeError]) -> tuple[float, float, RelativeError]:
    """Returns the mean relative error, the largest one, and the activation or graph that has it."""
    relative = {each: each.relative for each in errors}
    # NaN counts as the largest.
    worst = max(relative, key=lambda each: (relative[each] != relative[each], relative[each]))
    return sum(relative.values()) / len(relative), relative[worst], worst


def errors_line(errors: Sequence[RelativeError]) -> str:
    """Returns the log line on the activations of a forward."""
    mean, largest, worst = mean_and_worst(errors)
    where = f"{worst.path} in {worst.layer}" if worst.layer else worst.path
    return (
        f"{len(errors)} activations are saved in fp8, which is inexact: their relative error in the first batch is "
        f"{mean:.2%} on average and {largest:.2%} at most ({where}); gradients are inexact, too"
    )
