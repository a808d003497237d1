"""Captures the joint graphs of a training forward on fake tensors: nothing is run, nothing allocated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from optimum_memopt.compat.accelerate import fsdp_version, parallelisms
from optimum_memopt.compat.torch import class_forward
from optimum_memopt.engines.compile.capture.forward_call import ForwardArgs
from optimum_memopt.engines.compile.capture.traced_forward import TracedCall, TracedForward, no_training_graph
from optimum_memopt.engines.compile.capture.traced_graph import Choose, ForwardProgress, GraphChoices, TraceSpec
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import compressions
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward, trained_by
from optimum_memopt.engines.compile.partition.captured_graph import captured_graph, no_costs
from optimum_memopt.engines.compile.partition.choice import Choice, SavedNodes
from optimum_memopt.engines.compile.partition.conversions import conversions_of
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.shared import in_place
from optimum_memopt.engines.shared.forward_patch import Checkpointing, training_forward
from optimum_memopt.engines.torch_compat import dynamo, fully_shard
from optimum_memopt.errors import MemOptError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import TrainingArguments


def check_model(model: torch.nn.Module) -> None:
    """Refuse models that the engine cannot train under a plan.

    Raises:
        UnsupportedModelError: no parameters, a module returned by `torch.compile`, TorchScript, DataParallel, FSDP 1,
            tensor parallelism, FSDP2 shards offloaded to the host, Unsloth's forwards.
    """
    in_place.check_parameters(model)
    if dynamo.is_compiled(model):
        raise UnsupportedModelError(
            "the compile engine does not support torch.compile(model): it traces the model's own operators",
            "pass the model itself, which the engine compiles",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            "the compile engine does not support TorchScript models, whose forward torch does not trace",
            "pass the module that torch.jit was called with",
        )
    if isinstance(model, torch.nn.DataParallel):
        raise UnsupportedModelError(
            "the compile engine does not support torch.nn.DataParallel; start one process per GPU, for example with "
            "accelerate launch, or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
        )
    if any(_is_unsloths(module) for module in model.modules()):
        raise UnsupportedModelError(
            "the compile engine does not support Unsloth's kernels, which torch cannot trace",
            "load the model with transformers, whose --use_liger_kernel has fused kernels too, or leave the plan out",
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedModelError(*_FSDP_1)
    if fully_shard.has_other_shards(model):
        raise UnsupportedModelError(
            "the compile engine does not support tensor parallelism: a layer computes with a shard of its parameters "
            "(DTensor)",
            _GATHERED,
        )
    if fully_shard.is_offloaded(model):
        raise UnsupportedModelError(
            "the compile engine does not support FSDP2's CPU offload: it does not predict shards of parameters, "
            "gradients and optimizer states on the host",
            "turn it off (`cpu_offload` in --fsdp_config, `fsdp_offload_params` in accelerate's config); a plan "
            "can offload activations",
        )


def _is_unsloths(module: torch.nn.Module) -> bool:
    """True if Unsloth has replaced the forward of a module or of its class (`unsloth/models/llama.py`)."""
    names = (getattr(each, "__module__", None) or "" for each in (module.forward, class_forward(module)))
    return any(name.partition(".")[0].startswith("unsloth") for name in names)


_FSDP_1 = (
    "the compile engine does not support FSDP 1, which keeps a module's parameters in one flat tensor",
    "use FSDP2 (`version: 2` in --fsdp_config, `fsdp_version: 2` in accelerate's config, or `fully_shard`)",
)
_GATHERED = "use FSDP2, which gathers a layer's parameters before it runs"


def check_trainer_arguments(args: "TrainingArguments") -> None:
    """Refuse Trainer arguments that conflict with the engine.

    Raises:
        MemOptError: torch_compile, TRL's activation offloading, FSDP 1, parallelism within a layer or a row, several
            GPUs in one process.
    """
    if args.torch_compile:
        raise MemOptError("--torch_compile with the compile engine, which compiles the model already; leave it out")
    if getattr(args, "activation_offloading", False):
        raise MemOptError(
            "--activation_offloading with the compile engine: what TRL's hooks offload is not predicted; leave it "
            "out, and let a plan offload (--memory_opt_budget, or strategy 3 in --memory_opt_config)"
        )
    if fsdp_version(args) == 1:
        raise MemOptError("; ".join(_FSDP_1))
    if kinds := parallelisms(args):
        raise MemOptError(
            f"the compile engine does not support {' and '.join(kinds)} parallelism, where a process computes only a "
            f"part of each layer; {_GATHERED}"
        )
    if args.n_gpu > 1:
        raise MemOptError(
            f"the compile engine does not support {args.n_gpu} GPUs in one process; start one process per GPU, for "
            "example with accelerate launch, or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
        )


def chosen_by(producer: Producer) -> Choose:
    """Adapts a producer that needs no step context."""

    def choose(graph: AnalyzedGraph, state: ForwardProgress) -> Choice:
        return producer.choose(graph, state.choices)

    return choose


class Capture:
    """Traces a model's training forward and its backward.

    Args:
        model: a model of fake tensors in training mode; the caller has entered their mode.
        reader: name of the code that reads outputs beside the loss; empty if none does.

    Raises:
        UnsupportedModelError: see `check_model`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        inputs: Mapping[str, Any],
        spec: TraceSpec,
        choose: Choose,
        reader: str = "",
    ) -> None:
        check_model(model)
        self._model, self._args, self._inputs, self._reader = model, args, inputs, reader
        self._place = training_forward(model)
        self._traced = TracedForward(model, self._place.plain_forward, replace(spec, is_run=False))
        self.masks = self._traced.masks
        self._choices = GraphChoices(choose)

    def choose_again(self) -> None:
        """Discard the choices, so that the next run makes them again; no graph is retraced by dynamo."""
        self._choices = GraphChoices(self._choices.choose)

    def run(
        self,
        costs_of: Callable[[AnalyzedGraph], Costs] = no_costs,
        compared: Sequence[Producer] = (),
        compresses: bool = False,
    ) -> CapturedForward:
        """Trace the forward, and return its graphs with their choices.

        Args:
            costs_of: returns the costs of a graph's operators.
            compared: producers whose choices are also noted, after the applied one.
            compresses: plans for budgets may compress, even if no choice does.

        Raises:
            MemOptError: nothing in the model can be trained, or the plan does not match it.
            Exception: any error of tracing, as for a forward that reads values of its tensors.
        """
        call = self._call()
        if not call.ran:
            raise MemOptError(no_training_graph(call))
        plans = [[graph.choice for graph in call.ran], *(_choices(producer, call) for producer in compared)]
        compresses = compresses or any(compressions(choice.candidates) for of_graphs in plans for choice in of_graphs)
        # A graph may have several choices, but is captured once.
        captured = {
            id(graph): captured_graph(graph, costs_of(graph), conversions_of(graph, costs_of) if compresses else None)
            for graph in call.analyzed
        }
        graphs = tuple(
            replace(
                captured[id(graph)],
                plans=tuple(SavedNodes.of(graph, choice) for choice in chosen),
                partitioned=partitioned,
            )
            for graph, chosen, partitioned in zip(call.analyzed, zip(*plans, strict=True), call.ran, strict=True)
        )
        _, untrained = trained_by(call.tape, call.ran)
        return CapturedForward(graphs, call.tape, untrained)

    def _call(self) -> TracedCall:
        calls: list[TracedCall] = []

        def train(*args: Any, **kwargs: Any) -> Any:
            given = ForwardArgs.of(self._model, args, kwargs, not self._reader, self._reader)
            self.masks.note(given.inputs)
            calls.append(self._traced(given, self._choices))
            return calls[-1].outputs

        checkpointing = Checkpointing(self._model)
        # The choices take the place of checkpointing.
        checkpointing.switch_off()
        self._place.start(train)
        try:
            self._model(*self._args, **self._inputs)
        finally:
            self._place.stop()
            checkpointing.restore()
        (call,) = calls
        return call


def _choices(producer: Producer, call: TracedCall) -> list[Choice]:
    """Returns a producer's choice for the first run of each graph of a call."""
    choices: dict[int, Choice] = {}
    of_runs: list[Choice] = []
    for run in call.tape.calls:
        graph = replace(call.analyzed[run.graph], layer=run.layer)
        of_runs.append(producer.choose(graph, of_runs))
        choices.setdefault(run.graph, of_runs[-1])
    return [choices[number] for number in range(len(choices))]
