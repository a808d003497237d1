"""Joint graphs of models too large for this machine, traced on fake tensors, for budget.py."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch_config
from transformers.initialization import no_init_weights

from optimum_memopt.engines.compile.capture.capture import Capture
from optimum_memopt.engines.compile.capture.traced_graph import ForwardProgress, TraceSpec
from optimum_memopt.engines.compile.costs.costs import Costs, roofline
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, nodes_to_save
from optimum_memopt.engines.compile.graph.problem import Problem, problem_of
from optimum_memopt.engines.compile.memory.footprint import Footprint, StepContext
from optimum_memopt.engines.compile.options import MODEL
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.captured_graph import captured_graph
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.budget import FromBudget
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.train import engine as engine_module
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.simulator.devices import DEVICES
from optimum_memopt.engines.torch_compat import dynamo
from optimum_memopt.sizes import Budget

DEVICE = DEVICES["H100"]


@dataclass(frozen=True)
class Shape:
    """A model and its batch.

    Attributes:
        kind: `roberta` (masked LM), `deberta-v2` (classification) or `llama` (causal LM).
        layers: number of layers.
        hidden: width of the hidden states.
        batch_size: rows of the batch.
        seq_len: tokens per row.
    """

    kind: str
    layers: int
    hidden: int
    batch_size: int
    seq_len: int

    @property
    def text(self) -> str:
        return f"{self.layers} layers of {self.hidden}, batch {self.batch_size} x {self.seq_len}"


def build(shape: Shape) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns the model in training mode, with its config's dropout, and a batch."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, _HEADS[shape.kind])(make_config(shape)).train()
    ids = torch.randint(5, 1000, (shape.batch_size, shape.seq_len))
    labels = torch.zeros(shape.batch_size, dtype=torch.long) if shape.kind == "deberta-v2" else ids.clone()
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


_HEADS = {
    "roberta": "RobertaForMaskedLM",
    "deberta-v2": "DebertaV2ForSequenceClassification",
    "llama": "LlamaForCausalLM",
}


def make_config(shape: Shape) -> Any:
    """Returns the config of RoBERTa, DeBERTa-v2-xlarge or Llama-3.2-1B with another depth and width."""
    import transformers

    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.hidden // 64,
        "intermediate_size": 4 * shape.hidden,
        "max_position_embeddings": shape.seq_len + 2,
    }
    if shape.kind == "roberta":
        # The CPU has no fused attention with attention dropout.
        return transformers.RobertaConfig(**sizes, vocab_size=50_265, attention_probs_dropout_prob=0.0)
    if shape.kind == "llama":
        config = transformers.LlamaConfig(
            **sizes, vocab_size=128_256, num_key_value_heads=math.gcd(shape.hidden // 64, 8), tie_word_embeddings=True
        )
        config.use_cache = False
        return config
    return transformers.DebertaV2Config(
        **sizes,
        vocab_size=128_100,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=256,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        conv_kernel_size=0,
        problem_type="single_label_classification",
    )


@dataclass(frozen=True)
class Within(Producer):
    """Solves a budget for the graph alone, without the memory of the rest of the step.

    Attributes:
        bytes: the graph's budget.
        costs: returns the costs of the graph's operators.
        step: the context of the step; None for a step that holds nothing else and cannot offload.
    """

    bytes: int
    costs: Callable[[AnalyzedGraph], Costs]
    step: StepContext | None = None

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        forward = CapturedForward((captured_graph(graph, self.costs(graph)),))
        step = self.step or StepContext(self.bytes, Footprint(0, 0))
        budget = FromBudget(Budget(f"{self.bytes} bytes", self.bytes))
        choice = budget.solve(StepModel.of(forward, step)).choice(graph)
        assert choice is not None
        return choice


def attach(model: torch.nn.Module, producer: Producer) -> CompileEngine:
    """Attach an engine with a producer that no option selects, and fixed sizes, which are traced faster."""
    engine = CompileEngine(None, "aot_eager", dynamic=False)
    with mock.patch.object(engine_module, "producer_for", return_value=producer):
        engine.attach(model)
    # Steps do not keep the outputs, as with Trainer.
    engine.outputs_read_by = lambda: "the benchmark"
    return engine


def forward(
    shape: Shape, unit: str = MODEL, dynamic: bool = False, dtype: torch.dtype = torch.bfloat16
) -> CapturedForward:
    """Capture the forward of a model as a Trainer would train it, with estimated times on `DEVICE`.

    Args:
        shape: the model and its batch.
        unit: the compilation unit, one of `options.UNITS`.
        dynamic: whether the batch's sizes stay symbolic.
        dtype: the dtype of autocast; float32 for none.
    """

    def everything_saved(graph: AnalyzedGraph, state: ForwardProgress) -> Choice:
        return Choice(nodes_to_save(graph, ()), "everything is saved")

    torch._dynamo.reset()
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with dynamo.fake_tensors(), no_init_weights(), autocast:
        model, batch = build(shape)
        model.tie_weights()
        spec = TraceSpec("aot_eager", dynamic, unit=unit)
        return Capture(model, (), batch, spec, everything_saved).run(_roofline)


def trace(
    shape: Shape, look: Callable[[AnalyzedGraph], Any], dynamic: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Call `look` on the joint graph of a model whose forward is a single graph, and return the result; see
    `forward`."""
    (graph,) = forward(shape, MODEL, dynamic, dtype).graphs
    return look(graph.analyzed)


def _roofline(graph: AnalyzedGraph) -> Costs:
    return roofline(graph.joint, graph.size_hints, DEVICE, fused=True)


def estimated(graph: AnalyzedGraph) -> Problem:
    """Returns the graph's problem with estimated times on `DEVICE`, as for `optimum-cli memopt plan --device`."""
    return problem_of(graph, _roofline(graph).seconds)


def saved_by_torch(graph: AnalyzedGraph, budget: float) -> frozenset[str]:
    """Returns the names of the nodes that torch's partitioner saves with an `activation_memory_budget`."""
    module = graph.joint.module
    joint = module.graph
    module.graph = copy.deepcopy(joint)
    try:
        with functorch_config.patch(activation_memory_budget=budget):
            forward, _ = graph.partition_by_torch()
    finally:
        module.graph = joint
    (output,) = forward.graph.find_nodes(op="output")
    saved = output.args[0][graph.joint.num_fwd_outputs :]
    return frozenset(node.name for node in saved if isinstance(node, fx.Node) and node.op != "placeholder")


def saved_by_choice(choice: Choice) -> frozenset[str]:
    return frozenset(node.name for node in choice.nodes_to_save)


def roots_of(problem: Problem, names: frozenset[str]) -> frozenset[int]:
    """Returns the root nodes whose storages the named nodes lie in."""
    number: Mapping[str, int] = {name: index for index, name in enumerate(problem.names)}
    return frozenset(problem.roots[number[name]] for name in names)
