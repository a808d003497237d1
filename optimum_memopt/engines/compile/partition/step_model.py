"""A training step before it is compiled: what it takes under any plan, and the plans that fit.

One captured forward, for a batch of some sizes, in the step around it. The peak of a plan that has not run is always
computed here: for budgets and their curve, smaller batches, the ways that `plan` compares, the micro-batches of
`advise`, and what would have fit where memory ran out. It takes three steps:

1. The graphs of the forward, for these sizes, become one problem: operators that read, make and free storages.
2. A plan says which storages are saved. Its forward and backward are simulated, operator by operator, which gives the
   most bytes that they hold at once.
3. The context adds what the step holds beside them: parameters, states, gradients, the process.

What has been compiled is known better, from inductor's programs and CUDA's allocator: see `StepMemoryPredictor`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from optimum_memopt.engines.api.predictions import COMPUTE, COPIES, Frontier
from optimum_memopt.engines.api.run import ALONE
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.composition import StepEvents, compose
from optimum_memopt.engines.compile.memory.events import Schedule
from optimum_memopt.engines.compile.memory.footprint import Footprint, StepContext
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
from optimum_memopt.engines.compile.torch_compat import fx_graph


@dataclass(frozen=True, eq=False)
class StepModel:
    """A training step.

    Attributes:
        context: all that the step holds beside its graphs, with a batch of these sizes.
        sizes: of each graph, of the symbols that are sizes of the batch.
        segments: of every plan, as another rank has them; empty: those that each takes.
    """

    forward: CapturedForward
    context: StepContext
    sizes: Sequence[SymbolValues]
    segments: tuple[Link, ...] = ()

    @classmethod
    def of(cls, forward: CapturedForward, context: StepContext) -> "StepModel":
        """The step with the run's largest batch; where that is not known, with the one that was captured."""
        return cls(forward, context, forward.sizes_for(largest=context.largest))

    def around(self, context: StepContext) -> "StepModel":
        """The same graphs in another step, with what is known of them."""
        other = replace(self, context=context)
        if context.fixed.frees_gradients == self.context.fixed.frees_gradients:
            vars(other).update(problem=self.problem, solver=self.solver, compression=self.compression)
        return other

    def part(self, times: int) -> "StepModel":
        """The step with an n-th of the largest batch's rows, after others whose gradients are there."""
        context = replace(self.context, fixed=self.context.fixed.of_later_micro_batch())
        return replace(self, context=context, sizes=self.forward.sizes_for(times, self.context.largest), segments=())

    def with_rows(self, rows: int) -> "StepModel":
        """The step with n rows of the batch that was captured, and the time and the tensors that these take."""
        forward, fixed = self.forward, self.context.fixed
        before = max((size for graph in forward.graphs for size in graph.row_symbols.values()), default=rows)
        context = replace(self.context, fixed=replace(fixed, batch=fixed.batch * rows // before))
        priced = forward.priced([[each * rows / before for each in graph.costs.seconds] for graph in forward.graphs])
        return replace(self, forward=priced, context=context, sizes=forward.sizes_of(rows))

    def releasing_gradients(self) -> "StepModel":
        """The step whose optimizer steps in the backward."""
        return replace(self, context=replace(self.context, fixed=self.context.fixed.with_released_gradients()))

    def footprint(self, activations: int) -> Footprint:
        """The step with graphs that hold so many bytes."""
        footprint = self.context.footprint(activations)
        return replace(footprint, outputs=self.problem.outputs) if self.forward.tape.held_outputs.until else footprint

    def peak(self, activations: int) -> int:
        """The step's peak with graphs that hold so many bytes."""
        return self.footprint(activations).peak

    def among_others(self, events: Callable[[bool, bool], StepEvents], frees_gradients: bool) -> Footprint:
        """Returns the step under a plan, with the other forwards before its backward.

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
        """The graphs as one problem."""
        return self.forward.problem(self.sizes, self.context.fixed.frees_gradients)

    @cached_property
    def solver(self) -> ForwardSolver:
        """The solver of all graphs together; its bytes are those of the graphs alone."""
        return ForwardSolver(self.problem, self._host, self.segments, self.context.gather_rate, self.compression)

    @cached_property
    def compression(self) -> Compression | None:
        """The compression that plans may mix with recompute; None: none."""
        graphs = self.forward.graphs
        conversions = [graph.conversions for graph in graphs if graph.conversions is not None]
        if len(conversions) < len(graphs):
            return None
        forward = self.forward.problem(self.sizes, self.context.fixed.frees_gradients, with_conversions=True)
        return Compression(forward, [conversions[graph].deciding for graph in forward.graphs])

    @property
    def _host(self) -> Host | None:
        """The host, as the graphs may use it; None where there is no link to one."""
        if not self.context.link:
            return None
        graphs, problem = self.forward.graphs, self.problem
        places = enumerate(problem.places)
        allowed = {node for node, (run, local) in places if local in graphs[problem.graphs[run]].offloadable}
        return Host(self.context.link, self.context.host, frozenset(allowed | problem.passed))

    def events(
        self, plans: Sequence[SavedNodes] = (), frees_gradients: bool | None = None, without_caller: bool = False
    ) -> StepEvents:
        """The events of the graphs.

        Args:
            plans: of each run, see `CapturedForward.events`; empty: those that were applied.
            frees_gradients: see `compose`; None: as in this step.
            without_caller: see `Tape.without_caller`.
        """
        frees = self.context.fixed.frees_gradients if frees_gradients is None else frees_gradients
        forward = self.forward.without_caller() if without_caller else self.forward
        return forward.events(self.sizes, frees, plans)

    def problem_for(self, plans: Sequence[SavedNodes]) -> TapeProblem:
        """The graphs as one problem, with conversions where one of these plans compresses."""
        is_compressed = any(plan.compressed for plan in plans)
        return self.compression.forward if is_compressed and self.compression is not None else self.problem

    def simulated(self, plans: Sequence[SavedNodes], problem: TapeProblem | None = None) -> GraphSimulation:
        """The graphs under a plan without its offload, which is the same in all runs of a graph.

        Args:
            plans: of each graph.
            problem: None: `problem_for` these.
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
        """Every layer recomputed from its input."""
        solver = self.solver.solver
        return solver.plan(solver.layers_recomputed)

    @property
    def fits_by_torch(self) -> bool:
        """True where the step fits under torch's own partition, which does not look at bytes; False where that is not
        known."""
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
        """Seconds of the plan that was applied: of operators, recompute among them, and of waiting for copies."""
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
        """What budgets cost, and the place of a plan on that curve; `limit` is the budget that it was chosen for."""
        fixed = self.context.fixed
        place = None if chosen is None else point_of(chosen, fixed, limit)
        return Frontier(self.solver.curve(fixed), self.forward.costs, place)
