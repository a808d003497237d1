"""The error of gradients where activations are saved in fp8, measured once, in the first backward.

Behind the backward of a graph its forward and backward run once more, operator by operator, with everything saved as
it is, on the same arguments and the same gradients of its results. Gradients of its parameters are compared one graph
at a time, so that no second copy of all gradients is held.

That is the error which a graph adds: the gradients that it is given have errors of the graphs behind it already. Where
a model is one graph, it is all of the error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import compressions
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.memory.simulation import simulate_everything_saved
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.torch_compat import autograd, dynamo, fx_graph
from optimum_memopt.generators import GeneratorStates
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.capacity import capacity

_SUBJECT = "the error of gradients"
# The share of what is free that a measurement may take.
_FREE = 0.5


@dataclass(frozen=True)
class GradientError:
    """The squares of an error and of what is exact, summed over the gradients of a graph's parameters."""

    layer: str
    error: float
    exact: float

    @property
    def relative(self) -> float:
        """NaN where a gradient is not finite."""
        return 0.0 if self.exact == 0 else (self.error / self.exact) ** 0.5


@dataclass(eq=False)
class GradientErrors:
    """The errors of the graphs of a forward, which are told when the last one has been measured.

    Attributes:
        is_whole: all of the forward is one graph.
        waiting: backwards that have not come yet.
    """

    say: Callable[[str], None]
    is_whole: bool
    waiting: int = 0
    found: list[GradientError] = field(default_factory=list)

    def add(self, error: GradientError | None) -> None:
        """One backward more has run; None: it was not measured."""
        self.waiting -= 1
        if error is not None:
            self.found.append(error)
        if not self.waiting and self.found:
            self.say(gradients_line(self.found, self.is_whole))


@dataclass(frozen=True, eq=False)
class GradientProbe:
    """Measures the gradients of one graph.

    Attributes:
        run: computes the gradients of parameters, of a list of arguments that it empties.
        arguments: the graph's arguments that it takes, by their positions.
        results: the graph's results whose gradients it takes, behind the arguments, by their positions.
        parameters: the arguments that it returns the gradients of, by their positions.
        bytes: that it holds.
    """

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    parameters: tuple[int, ...]
    bytes: int

    @classmethod
    def of(
        cls, graph: AnalyzedGraph, choice: Choice, parameters: Sequence[str], runs_operators: bool
    ) -> "GradientProbe | None":
        """The probe of a joint graph, which it copies; None where nothing is compressed, an argument is none of the
        traced graph's, or a compiler draws other random numbers than operators do.

        Args:
            parameters: the name of each argument that is a parameter, empty for the others.
            runs_operators: it runs without a compiler.
        """
        joint = graph.joint
        draws = any(map(fx_graph.is_random, joint.forward))
        if not compressions(choice.candidates) or (draws and not runs_operators):
            return None
        probed = fx.Graph()
        returned = dynamo.tree_leaves(probed.graph_copy(joint.module.graph, {}))[joint.num_fwd_outputs :]
        positions = fx_graph.gradient_positions(joint.module.graph)[joint.num_fwd_outputs :]
        gradients = {
            at: node
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
        for node in reversed(probed.nodes):
            # Which would write to the model's state a second time.
            if fx_graph.written_by(node) and not node.users:
                probed.erase_node(node)
        fx_graph.remove_dead_code(probed, lambda node: True)
        run = fx_graph.run_operators(fx.GraphModule(joint.module, probed), ())
        held = simulate_everything_saved(problem_of(graph, [0.0] * len(joint.nodes))).peak
        return cls(run, arguments, results, tuple(gradients), held)

    def watch(
        self,
        args: Sequence[Any],
        returned: Sequence[Any],
        generators: GeneratorStates,
        layer: str,
        errors: GradientErrors,
    ) -> None:
        """Measure behind the backward of a run.

        Args:
            generators: as the run found them.
            layer: that has run; empty: none.
        """
        results = [returned[at] for at in self.results]
        nodes = {result.grad_fn for result in results if isinstance(result, torch.Tensor)}
        node = nodes.pop() if len(nodes) == 1 else None
        if node is None:
            return
        outputs, held = [result.output_nr for result in results], list(args)
        # Of a result that the loss does not depend on there is none.
        like = [(tuple(result.shape), {"dtype": result.dtype, "device": result.device}) for result in results]
        errors.waiting += 1

        def measure(gradients: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
            # A graph that is kept may run its backward again.
            if not held:
                return
            own = held.copy()
            held.clear()
            error = None
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
        """The gradients of parameters; none where there is no room for them.

        Args:
            tangents: the gradient of each result, None for zeros, and the result's shape and kind.
        """
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        if self.bytes > _FREE * capacity(device).available:
            return ()
        now = GeneratorStates.of(device)
        generators.restore()
        try:
            with torch.no_grad(), fx_graph.without_modes_and_autocast():
                given = [torch.zeros(shape, **kind) if each is None else each for each, shape, kind in tangents]
                return self.run([*(args[at] for at in self.arguments), *given])
        finally:
            now.restore()


def _error(layer: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> GradientError:
    squares = [((ours.float() - exact.float()).square().sum(), exact.float().square().sum()) for ours, exact in pairs]
    return GradientError(layer, *(sum(float(each) for each in column) for column in zip(*squares, strict=True)))


def gradients_line(errors: Sequence[GradientError], is_whole: bool) -> str:
    """The line about the gradients of a first batch; `is_whole`: see `GradientErrors`."""
    # NaN is the largest.
    worst = max(errors, key=lambda each: (each.relative != each.relative, each.relative))
    if is_whole:
        return (
            f"gradients are inexact by {worst.relative:.2%} in the first batch, since activations are saved in fp8: "
            "the norm of the difference over that of exact gradients"
        )
    mean = sum(each.relative for each in errors) / len(errors)
    return (
        f"activations in fp8 make gradients of each of {len(errors)} graphs inexact by {mean:.2%} on average and "
        f"{worst.relative:.2%} at most ({worst.layer or 'outside of layers'}) in the first batch; errors of later "
        "layers add up in earlier ones"
    )
