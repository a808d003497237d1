"""Measures the error of gradients with activations saved in fp8, once, in the first backward.

After a graph's backward, its forward and backward are rerun operator by operator, with nothing compressed, on the same
arguments and the same output gradients. The gradients of its parameters are compared before the next graph's backward,
so that no second copy of all gradients is held.

The result is the error that each graph adds: its output gradients already have the errors of the graphs after it. For
a model in one graph, it is the whole error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.capture.error_probe import RelativeError, mean_and_worst, squares
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import compressions
from optimum_memopt.engines.compile.graph.joint import first_input, is_accumulation
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.memory.simulation import simulate_everything_saved
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.torch_compat import autograd, dynamo, fx_graph
from optimum_memopt.generators import GeneratorStates, preserved_generators
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.capacity import capacity

_SUBJECT = "the error of gradients"
# The share of free memory that a measurement may take.
_FREE = 0.5


@dataclass(eq=False)
class GradientErrors:
    """Collects the gradient errors of a forward's graphs, and logs them after the last backward.

    Attributes:
        is_whole: the forward is one graph.
        waiting: number of backwards that have not run.
    """

    say: Callable[[str], None]
    is_whole: bool
    waiting: int = 0
    found: list[RelativeError] = field(default_factory=list)

    def add(self, error: RelativeError | None) -> None:
        """Note that a backward has run; None: its error was not measured."""
        self.waiting -= 1
        if error is not None:
            self.found.append(error)
        if not self.waiting and self.found:
            self.say(gradients_line(self.found, self.is_whole))


@dataclass(frozen=True, eq=False)
class GradientProbe:
    """Measures the error of one graph's gradients.

    Attributes:
        run: takes a list of arguments, which it empties, and returns the gradients of parameters.
        arguments: positions of the graph's arguments that `run` takes.
        results: positions of the graph's results whose gradients `run` takes, after the arguments.
        parameters: positions of the arguments whose gradients `run` returns.
        bytes: peak of the bytes that a run holds.
        unread: positions of the results whose gradients `run` does not read.
    """

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    parameters: tuple[int, ...]
    bytes: int
    unread: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, graph: AnalyzedGraph, choice: Choice, parameters: Sequence[str], runs_operators: bool
    ) -> "GradientProbe | None":
        """Returns the probe of a joint graph, which it copies; None if nothing is compressed, the joint graph has an
        argument that the traced graph does not have, or a compiler draws other random numbers than operators do.

        Args:
            parameters: the name of each argument that is a parameter, empty for the others.
            runs_operators: the graph runs without a compiler.
        """
        joint = graph.joint
        if not compressions(choice.candidates):
            return None
        if not runs_operators and any(map(fx_graph.is_random, joint.forward)):
            return None
        probed = fx.Graph()
        returned = dynamo.tree_leaves(probed.graph_copy(joint.module.graph, {}))[joint.num_fwd_outputs :]
        positions = fx_graph.gradient_positions(joint.module.graph)[joint.num_fwd_outputs :]
        gradients = {
            at: first_input(node) if is_accumulation(node) else node
            for at, node in zip(positions, returned, strict=True)
            if at is not None and parameters[at] and isinstance(node, fx.Node)
        }
        probed.output(list(gradients.values()))
        inputs = probed.find_nodes(op="placeholder")
        given = [fx_graph.input_position(node) for node in inputs]
        tangents = [fx_graph.tangent_position(node) for node in inputs]
        arguments = tuple(at for at in given if at is not None)
        results = tuple(at for at in tangents if at is not None)
        is_known = [*given[: len(arguments)], *tangents[len(arguments) :]] == [*arguments, *results]
        if not is_known or not gradients:
            return None
        fx_graph.remove_unread_writes(probed)
        fx_graph.remove_dead_code(probed, lambda node: True)
        unread = frozenset(at for node, at in zip(inputs, tangents, strict=True) if at is not None and not node.users)
        run = fx_graph.run_operators(fx.GraphModule(joint.module, probed), ())
        held = simulate_everything_saved(problem_of(graph, [0.0] * len(joint.nodes))).peak
        return cls(run, arguments, results, tuple(gradients), held, unread)

    def watch(
        self,
        args: Sequence[Any],
        returned: Sequence[Any],
        generators: GeneratorStates,
        layer: str,
        errors: GradientErrors,
    ) -> None:
        """Register a hook that measures the error after the backward of a run.

        Args:
            args: arguments of the run.
            returned: results of the run.
            generators: states of the random generators before the run.
            layer: path of the layer that has run; empty outside of layers.
            errors: collects the error.
        """
        results = [returned[at] for at in self.results]
        nodes = {result.grad_fn for result in results if isinstance(result, torch.Tensor)}
        node = nodes.pop() if len(nodes) == 1 else None
        if node is None:
            return
        outputs, held = [result.output_nr for result in results], list(args)
        unread = [number for number, at in zip(outputs, self.results, strict=True) if at in self.unread]
        # A result that the loss does not depend on has no gradient, and gets zeros like it.
        like = [(tuple(result.shape), {"dtype": result.dtype, "device": result.device}) for result in results]
        errors.waiting += 1

        def measure(gradients: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
            # With `retain_graph`, a backward may run again.
            if not held:
                return
            own = held.copy()
            held.clear()
            error = None
            if any(given[number] is not None for number in unread):
                errors.add(None)
                return
            with best_effort(_SUBJECT):
                exact = self._exact(
                    own, [(given[at], *kind) for at, kind in zip(outputs, like, strict=True)], generators
                )
                found = autograd.gradients_of_leaves(node, gradients)
                pairs = [(found.get(id(own[at])), each) for at, each in zip(self.parameters, exact, strict=False)]
                compared = [(ours, each) for ours, each in pairs if ours is not None]
                error = _error(layer, compared) if compared else None
            errors.add(error)

        node.register_hook(measure)

    def _exact(
        self,
        args: Sequence[Any],
        tangents: Sequence[tuple[torch.Tensor | None, tuple[int, ...], Mapping[str, Any]]],
        generators: GeneratorStates,
    ) -> Sequence[torch.Tensor]:
        """Compute the exact gradients of parameters; returns none if memory does not suffice.

        Args:
            args: all arguments of the graph.
            tangents: the gradient of each result (None: zeros), its shape, and its dtype and device.
            generators: states of the random generators before the run.
        """
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        if self.bytes > _FREE * capacity(device).available:
            return ()
        with preserved_generators(device), torch.no_grad(), fx_graph.without_modes_and_autocast():
            generators.restore()
            given = [torch.zeros(shape, **kind) if each is None else each for each, shape, kind in tangents]
            return self.run([*(args[at] for at in self.arguments), *given])


def _error(layer: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> RelativeError:
    sums = [squares(ours.float() - exact.float(), exact.float()) for ours, exact in pairs]
    return RelativeError(layer, "", torch.stack(sums).sum(0))


def gradients_line(errors: Sequence[RelativeError], is_whole: bool) -> str:
    """Returns the log line on the gradients of a first batch; `is_whole`: see `GradientErrors`."""
    mean, largest, worst = mean_and_worst(errors)
    if is_whole:
        return (
            f"gradients are inexact by {largest:.2%} in the first batch, since activations are saved in fp8: "
            "the norm of their error over the norm of exact gradients"
        )
    return (
        f"activations in fp8 make gradients of each of {len(errors)} graphs inexact by {mean:.2%} on average and "
        f"{largest:.2%} at most ({worst.layer or 'outside of layers'}) in the first batch; errors of later "
        "layers add up in earlier ones"
    )
