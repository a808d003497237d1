"""A training step before it is compiled: predicts its peak under any plan, and finds the plans that fit.

A step model is one captured forward, for given batch sizes, in its step. The peak of a plan that has not run is always
computed here: for budgets and their curve, smaller batches, the alternatives that `plan` compares, the micro-batches
of `advise`, and the plans that would have fit after an out-of-memory error. The prediction has three parts:

1. The graphs of the forward, for these sizes, become one problem: operators that read, allocate and free storages.
2. A plan says which storages are saved. Its forward and backward are simulated, operator by operator, which gives the
   most bytes that they hold at once.
3. The context adds what else the step holds: parameters, optimizer states, gradients, the process.

Compiled graphs are predicted more exactly, from inductor's programs and CUDA's allocator: see `StepMemoryPredictor`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from optimum_memopt.engines.api.predictions import COMPUTE, COPIES, Frontier
from optimum_memopt.engines.api.run import ALONE
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.composition import compose
from optimum_memopt.engines.compile.memory.footprint import Footprint, StepContext
from optimum_memopt.engines.compile.memory.schedule import Schedule
from optimum_memopt.engines.compile.memory.simulation import GraphSimulation, simulate
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.choice import SavedNodes, torchs_choice
from optimum_memopt.engines.compile.partition.partitioned_graph import timeline_of
from optimum_memopt.engines.compile.solver.compression import Compression
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.compile.solver.offload import Host, stall_of
from optimum_memopt.engines.compile.solver.segments import Link, seconds_again
from optimum_memopt.engines.compile.solver.solver import Plan, point_of
from optimum_memopt.engines.simulator.events import StepEvents
from optimum_memopt.engines.torch_compat import fx_graph


@dataclass(frozen=True, eq=False)
class StepModel:
    """A training step.

    Attributes:
        context: everything that the step holds outside its graphs, with a batch of these sizes.
        sizes: each graph's values of the symbols that are sizes of the batch.
        segments: the segments of every plan, chosen by another rank; empty: each plan chooses its own.
    """

    forward: CapturedForward
    context: StepContext
    sizes: Sequence[SymbolValues]
    segments: tuple[Link, ...] = ()

    @classmethod
    def of(cls, forward: CapturedForward, context: StepContext) -> "StepModel":
        """Returns the step with the run's largest batch, or with the captured batch if the largest is not known."""
        return cls(forward, context, forward.sizes_for(largest=context.largest))

    def around(self, context: StepContext) -> "StepModel":
        """Returns the same graphs in another context, with the cached problem and solvers if they still apply."""
        other = replace(self, context=context)
        if context.fixed.frees_gradients == self.context.fixed.frees_gradients:
            vars(other).update(problem=self.problem, compression=self.compression)
            # The host's free memory may differ, but not what recompute alone can do.
            vars(other.solver).update(solver=self.solver.solver)
        return other

    def part(self, times: int) -> "StepModel":
        """Returns the step with an n-th of the largest batch's rows, as a later micro-batch, which finds the gradients
        of earlier ones."""
        context = replace(self.context, fixed=self.context.fixed.of_later_micro_batch())
        return replace(self, context=context, sizes=self.forward.sizes_for(times, self.context.largest), segments=())

    def with_rows(self, rows: int) -> "StepModel":
        """Returns the step with n rows of the captured batch; times and the batch's bytes are scaled."""
        forward, fixed = self.forward, self.context.fixed
        before = max((size for graph in forward.graphs for size in graph.row_symbols.values()), default=rows)
        context = replace(self.context, fixed=replace(fixed, batch=fixed.batch * rows // before))
        return replace(
            self, forward=forward.slower(rows / before), context=context, sizes=forward.sizes_of(rows), segments=()
        )

    def releasing_gradients(self) -> "StepModel":
        """Returns the step with an optimizer that steps in the backward."""
        return replace(self, context=replace(self.context, fixed=self.context.fixed.with_released_gradients()))

    def footprint(self, activations: int) -> Footprint:
        """Returns the step's footprint with that many bytes held by its graphs."""
        footprint = replace(self.context.fixed, activations=activations)
        return replace(footprint, outputs=self.problem.outputs) if self.forward.tape.held_outputs.until else footprint

    def peak(self, activations: int) -> int:
        """Returns the step's peak with that many bytes held by its graphs."""
        return self.footprint(activations).peak

    def among_others(self, events: Callable[[bool, bool], StepEvents], frees_gradients: bool) -> Footprint:
        """Returns the step's footprint under a plan, with the other forwards before its backward.

        Its peak is the higher of two moments: the last forward, while all others hold what they save; and the backward
        of an earlier forward, which begins with the gradients of the later ones.

        Args:
            events: composes the graphs' events under the plan; takes `frees_gradients` and `without_caller`.
        """
        last = self.footprint(events(frees_gradients, False).peak())
        if (others := self.context.others) == ALONE:
            return last
        saved = events(False, True).saved_bytes
        last = replace(last, other_forwards=round(others.earlier * saved))
        earlier = self.footprint(events(True, False).peak(self.context.fixed.gradients))
        earlier = replace(earlier, other_forwards=round(others.between * saved))
        return max(last, earlier, key=lambda each: each.peak)

    @cached_property
    def problem(self) -> TapeProblem:
        """Returns the graphs as one problem."""
        return self.forward.problem(self.sizes, self.context.fixed.frees_gradients)

    @cached_property
    def solver(self) -> ForwardSolver:
        """Returns the solver for all graphs together; its bytes are those of the graphs alone."""
        return ForwardSolver(self.problem, self._host, self.segments, self.context.gather_rate, self.compression)

    @cached_property
    def compression(self) -> Compression | None:
        """Returns the compression that plans may mix with recompute, or None."""
        graphs = self.forward.graphs
        conversions = [graph.conversions for graph in graphs if graph.conversions is not None]
        if len(conversions) < len(graphs):
            return None
        forward = self.forward.problem(self.sizes, self.context.fixed.frees_gradients, with_conversions=True)
        return Compression(forward, [conversions[graph].deciding for graph in forward.graphs])

    @property
    def _host(self) -> Host | None:
        """Returns the host and the nodes that may be offloaded to it; None if there is no link to a host."""
        if not self.context.link:
            return None
        graphs, problem = self.forward.graphs, self.problem
        places = enumerate(problem.places)
        allowed = {node for node, (run, local) in places if local in graphs[problem.graphs[run]].offloadable}
        return Host(self.context.link, self.context.host, frozenset(allowed | problem.passed))

    def events(
        self, plans: Sequence[SavedNodes] = (), frees_gradients: bool | None = None, without_caller: bool = False
    ) -> StepEvents:
        """Returns the events of the graphs.

        Args:
            plans: a plan for each run, see `CapturedForward.events`; empty: the applied plans.
            frees_gradients: see `compose`; None: as in this step.
            without_caller: see `Tape.without_caller`.
        """
        frees = self.context.fixed.frees_gradients if frees_gradients is None else frees_gradients
        forward = self.forward.without_caller() if without_caller else self.forward
        return forward.events(self.sizes, frees, plans)

    def problem_for(self, plans: Sequence[SavedNodes]) -> TapeProblem:
        """Returns the graphs as one problem, with conversions if one of these plans compresses."""
        is_compressed = any(plan.compressed for plan in plans)
        return self.compression.forward if is_compressed and self.compression is not None else self.problem

    def simulated(self, plans: Sequence[SavedNodes], problem: TapeProblem | None = None) -> GraphSimulation:
        """Simulates the graphs under a plan that is the same in all runs of a graph, without its offload.

        Args:
            plans: a plan for each graph.
            problem: the graphs as one problem; None: `problem_for` these plans.
        """
        problem = problem or self.problem_for(plans)
        saved = problem.of_all([plans[graph].saved for graph in problem.graphs])
        compressed = {
            node
            for node in problem.problem.conversions
            if problem.places[node][1] in plans[problem.graphs[problem.places[node][0]]].compressed
        }
        return simulate(problem.problem, saved, compressed & saved)

    def level_1(self) -> Plan:
        """Returns the plan that recomputes every layer from its input."""
        solver = self.solver.solver
        return solver.plan(solver.layers_recomputed)

    @property
    def fits_by_torch(self) -> bool:
        """True if the step fits under torch's own partition, which ignores bytes; False if that is not known."""
        own: list[Schedule] = []
        for graph in self.forward.graphs:
            if fx_graph.is_checkpointed(graph.analyzed.joint.module.graph):
                return False
            modules = torchs_choice(graph.analyzed).torchs_graphs
            assert modules is not None
            own.append(timeline_of(graph.analyzed, modules))
        tape, sizes = self.forward.sizes_of_runs(self.sizes)
        runs = [own[call.graph].at(values) for call, values in zip(tape.calls, sizes, strict=True)]
        tape, context = tape.with_all_held(), self.context

        def events(frees_gradients: bool, without_caller: bool) -> StepEvents:
            return compose(tape.without_caller() if without_caller else tape, runs, frees_gradients)

        step = self.among_others(events, context.fixed.frees_gradients)
        return step.peak <= context.limit - context.margin

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the applied plan: of operators, recompute included, and of waiting for copies."""
        plans, calls = [graph.plans[0] for graph in self.forward.graphs], self.forward.tape.calls
        problem, simulation = self.problem_for(plans), self.simulated(plans)
        away = [
            node
            for node, (run, local) in enumerate(problem.places)
            if local in plans[problem.graphs[run]].offloaded
            or problem.runs[run].positions.inputs.get(local) in calls[run].offloaded
        ]
        again = seconds_again(self.problem, self.forward.tape, self.context.gather_rate)
        return {
            COMPUTE: simulation.seconds(problem.problem) + again,
            COPIES: stall_of(problem.problem, simulation, away, self.context.link),
        }

    def frontier(self, chosen: Plan | None = None, limit: int | None = None) -> Frontier:
        """Returns the time-memory curve of budgets, with the point of a plan on it; `limit` is the plan's budget."""
        fixed = self.context.fixed
        place = None if chosen is None else point_of(chosen, fixed, limit)
        return Frontier(self.solver.curve(fixed), self.forward.costs, place)
