"""`optimum_memopt.plan` from Python, against the memory of the same steps."""

import copy
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from allocations import allocated

import optimum_memopt
from optimum_memopt import Estimate, MemOptError, plan
from optimum_memopt.engines.compile.capture.capture import Capture
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.predict.estimate import largest
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.predict.workload import ModuleWorkload, Workload
from tests.rotation import in_turn, nightly
from tests.saved_configs import save

ON_H100 = {"device": "h100", "compiler": "aot_eager"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("model"), "gpt2", n_layer=1, architectures=["GPT2LMHeadModel"])


@pytest.fixture(scope="module")
def config(folder: str) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.from_pretrained(folder)


@pytest.fixture(scope="module")
def found(config: transformers.PretrainedConfig) -> Estimate:
    return plan(config, batch_size=8, seq_len=24, **ON_H100)


class Classifier(torch.nn.Module):
    """A module without a transformers config: a tensor in, logits out; one tensor is neither parameter nor buffer."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.first, self.last = (torch.nn.Linear(*sizes, device=device) for sizes in ((64, 256), (256, 10)))
        self.register_buffer("mean", torch.zeros(64, device=device))
        self.scales = [torch.ones(64, device=device)]

    def forward(self, pixels: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        hidden = (pixels - self.mean) * self.scales[0] + offset
        return self.last(torch.nn.functional.gelu(self.first(hidden)))


def test_a_config_a_folder_and_a_model_are_the_same_step(folder, config, found) -> None:
    before = config.to_dict()
    for model in (folder, transformers.GPT2LMHeadModel(config)):
        other = plan(model, batch_size=8, seq_len=24, **ON_H100)
        assert (other.peak, other.breakdown) == (found.peak, found.breakdown)
    assert config.to_dict() == before
    assert found.table.header[0].startswith("GPT2LMHeadModel in float32 on H100 by aot_eager, no plan")


def test_what_is_held_adds_up_to_the_peak(found: Estimate) -> None:
    assert sum(found.breakdown.values()) == found.peak
    assert found.breakdown["optimizer"] == 2 * found.breakdown["parameters"]
    assert 0 <= found.breakdown["allocator"] < 0.1 * found.peak < found.peak <= found.reserved


def of_llama(layers: int, **how) -> Estimate:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=512)
    return plan(config, "text-generation", batch_size=8, seq_len=64, **how)


# As one graph, and by layers, where a first capture reveals the graphs.
@in_turn
@pytest.mark.parametrize(("layers", "captures"), [(2, 1), (4, 2)])
def test_a_budget_counts_blocks_of_the_allocator_before_its_plan_is_compiled(layers, captures, monkeypatch) -> None:
    """A budget includes the allocator's blocks before the plan is compiled; else it would be solved and compiled
    again."""
    runs: list[CapturedForward] = []
    run = Capture.run
    monkeypatch.setattr(Capture, "run", lambda *args: runs.append(run(*args)) or runs[-1])
    free, low = (of_llama(layers, **how, **ON_H100) for how in ({}, {"level": 1}))
    budget = (free.peak + low.peak) // 2 >> 20
    runs.clear()
    assert of_llama(layers, budget=f"{budget}MiB", **ON_H100).peak <= budget << 20
    assert len(runs) == captures


def test_a_budget_in_which_all_layers_fit_is_no_plan() -> None:
    """A budget that all layers fit in is no plan; torch's own partition is checked outside the tensors' fake mode."""
    assert "budget" in (header := of_llama(4, budget="100%", compiler="aot_eager").table.header[0])
    assert "fits without a plan, torch's own partition" in header


@pytest.mark.parametrize(
    ("how", "compiler"),
    nightly(
        itertools.product(
            ({}, {"level": 1}, {"config": "QuickGelu+:1:-1"}, {"budget": "100%"}), ("aot_eager", "inductor")
        ),
        but=[({}, "aot_eager")],
    ),
    ids=str,
)
def test_tensors_at_the_peak_add_up_to_it(how, compiler: str) -> None:
    estimate = of_llama(2, device="h100", bf16=True, compiler=compiler, loss="plain", **how)
    held = estimate.at_peak
    assert sum(group.bytes for group in held) == estimate.peak
    assert [group.bytes for group in held] == sorted((group.bytes for group in held), reverse=True)
    by_category = {"parameters": "parameters", "optimizer states": "optimizer", "saved activations": "activations"}
    for category, part in by_category.items():
        of_category = [group for group in held if group.category == category]
        assert sum(group.bytes for group in of_category) == estimate.breakdown[part]
        assert all(group.count > 0 for group in of_category)


@in_turn
def test_tensors_at_the_peak_here_and_with_gradients_of_earlier_micro_batches() -> None:
    estimate = of_llama(2, gradient_accumulation_steps=2)
    assert sum(group.bytes for group in estimate.at_peak) == estimate.peak
    assert sum(group.count for group in estimate.at_peak if group.category == "gradients") >= 20


@in_turn
def test_equal_layers_have_one_row_of_their_tensors_at_the_peak() -> None:
    """Equal layers share a row of tensors at the peak, the loss, where each layer has saved its attention's output."""
    attention = {}
    for layers in (2, 3):
        groups = of_llama(layers, device="h100", compiler="aot_eager", loss="plain").at_peak
        (attention[layers],) = (group for group in groups if group.name == "Attention+")
    assert attention[2].where == "model.layers.*.self_attn x 2"
    assert attention[3].layers == tuple(f"model.layers.{number}" for number in range(3))
    assert 3 * attention[2].bytes == 2 * attention[3].bytes and attention[3].count == 3


def test_it_fits_what_it_takes(found: Estimate) -> None:
    assert found.fits(found.peak) and not found.fits(found.peak - 1)
    assert found.fits("1GiB") and found.fits("1%") and found.fits() and not found.fits("1MiB")
    with pytest.raises(MemOptError, match="^budget 24: a number needs a unit, such as 24GiB or 24%$"):
        found.fits("24")
    for wrong in (None, 1.5, True, b"24GiB", [24], -1, 10**30, "9" * 400 + "GiB"):
        for ask in (found.fits, found.largest_batch) if wrong is not None else (found.fits,):
            with pytest.raises(MemOptError, match="^budget .*: allowed: sizes such as 24GiB"):
                ask(wrong)


class Stack(torch.nn.Module):
    """Layers whose activations can be recomputed, and a loss."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.nn.functional.gelu(layer(rows)).sin()
        return rows.sum()


def of_stack(rows: int, **how) -> Estimate:
    with torch.device("meta"):
        return plan(Stack(), example_inputs=torch.empty(rows, 64), **ON_H100, **how)


def test_the_largest_batch_fits_and_the_next_one_does_not() -> None:
    small = of_stack(512)
    budget = 2 * small.peak
    rows = small.largest_batch(budget)
    assert rows > 4 * 512
    fitting, next_one = (of_stack(size).peak for size in (rows, rows + 1))
    # A trace with symbolic sizes keeps values that one with fixed sizes folds into constants.
    assert fitting <= 1.001 * budget < 1.002 * next_one
    assert small.largest_batch(budget // 100) == 0


@pytest.mark.nightly
def test_the_largest_batch_of_a_level(config) -> None:
    small = plan(config, batch_size=4, seq_len=24, level=1, **ON_H100)
    rows = small.largest_batch(3 * small.peak)
    peaks = [plan(config, batch_size=size, seq_len=24, level=1, **ON_H100).peak for size in (rows, rows + 1)]
    assert peaks[0] <= 1.005 * 3 * small.peak < 1.01 * peaks[1]


@pytest.mark.nightly
def test_with_a_budget_the_largest_batch_is_the_last_that_has_a_plan() -> None:
    unplanned = of_stack(8192)
    budget = f"{unplanned.peak / 2**20:.3f}MiB"
    rows = of_stack(4096, budget=budget).largest_batch()
    assert rows >= 0.99 * 8192
    assert of_stack(rows, budget=budget).peak <= 1.001 * unplanned.peak
    with pytest.raises(MemOptError, match="even with full recompute"):
        of_stack(round(1.1 * rows), budget=budget)


@pytest.mark.nightly
def test_a_budget_lets_larger_batches_fit_than_no_plan_does(config) -> None:
    # A single layer holds less than the chunks of the loss.
    deep = copy.deepcopy(config)
    deep.n_layer = 4
    unplanned = plan(deep, batch_size=16, seq_len=24, **ON_H100)
    budget = f"{unplanned.peak / 2**20:.3f}MiB"
    without = unplanned.largest_batch(budget)
    rows = plan(deep, batch_size=16, seq_len=24, budget=budget, **ON_H100).largest_batch()
    assert rows > 1.2 * without
    assert plan(deep, batch_size=rows, seq_len=24, budget=budget, **ON_H100).peak <= 1.01 * unplanned.peak
    with pytest.raises(MemOptError, match="even with full recompute"):
        plan(deep, batch_size=round(1.1 * rows), seq_len=24, budget=budget, **ON_H100)


def ids_of(model: torch.nn.Module) -> dict[str, int]:
    return {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_stays_as_it_is_and_its_step_is_the_real_one(device: str) -> None:
    model = Classifier(device).eval()
    before, attributes = ids_of(model), set(vars(model))
    state = copy.deepcopy(model.state_dict())
    pixels = torch.rand(128, 64, device=device)
    drawn = torch.get_rng_state()
    found = plan(model, example_inputs=(pixels,), compiler="aot_eager")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert ids_of(model) == before
    assert set(vars(model)) == attributes and not model.training and "forward" not in vars(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    if device == "cpu":
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    real = Classifier()
    engine = CompileEngine(compiler="aot_eager", dynamic=False)
    engine.attach(real)
    batch = {"pixels": torch.rand(128, 64)}
    real(**batch).sum().backward()
    parts = engine.predictor.footprint()
    held = found.breakdown
    in_backward = ("activations", "gradients", "recomputed", "temporaries")
    assert sum(held[name] for name in in_backward) == parts.activations
    assert (held["parameters"], held["batch"]) == (parts.parameters + parts.buffers, parts.batch)
    real.zero_grad()
    peak, _, _ = allocated(lambda: real(**batch).sum().backward())
    assert parts.activations == pytest.approx(peak, rel=0.02)
    engine.detach()


def test_a_module_with_other_rows_and_frozen_parameters() -> None:
    model, pixels = Classifier(), torch.rand(16, 64)
    small, large = (plan(model, example_inputs=pixels, batch_size=rows, **ON_H100) for rows in (16, 128))
    assert large.breakdown["batch"] == 8 * small.breakdown["batch"]
    frozen = plan(model, example_inputs={"pixels": pixels, "offset": 1.0}, trainable="last", **ON_H100)
    last = sum(parameter.nbytes for parameter in model.last.parameters())
    assert frozen.breakdown["optimizer"] == 2 * last
    assert all(parameter.requires_grad for parameter in model.parameters())
    rows = small.largest_batch(4 * small.peak)
    assert plan(model, example_inputs=pixels, batch_size=rows, **ON_H100).peak <= 4.02 * small.peak


@pytest.mark.parametrize(
    ("inputs", "line"),
    [
        (None, "Classifier: a module without a transformers config needs example_inputs"),
        ({"pixel": torch.ones(2, 64)}, "example_inputs: forward of Classifier: missing a required argument: 'pixels'"),
        ((torch.ones(2, 64), 1.0, 2.0), "example_inputs: forward of Classifier: too many positional arguments"),
        ({"pixels": 3.0}, "example_inputs: none of them is a tensor with a first dimension, the rows of a batch"),
        (3, "example_inputs: a dict, a tuple or a tensor, not int"),
        (torch.ones(2, 63), "Classifier cannot be traced on fake tensors (RuntimeError: "),
    ],
)
def test_inputs_that_are_none_of_the_modules(inputs: object, line: str) -> None:
    model = Classifier()
    attributes = set(vars(model))
    with pytest.raises(MemOptError) as caught:
        plan(model, example_inputs=inputs)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    assert set(vars(model)) == attributes and type(torch.ones(1)) is torch.Tensor


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"model": 3}, "plan takes a folder, a name on the hub, a transformers config or a torch.nn.Module, not int"),
        ({"model": "no/such/folder"}, "model no/such/folder: no such folder or config file"),
        ({"task": "nonsense"}, "task nonsense: allowed: "),
        ({"batch_size": 0}, "batch_size 0: allowed: whole numbers from 1 to 2147483648"),
        ({"seq_len": -1}, "seq_len -1: allowed: whole numbers from 1 to 2147483648"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps 0: allowed: whole numbers from 1 up"),
        ({"bf16": True, "fp16": True}, "bf16 together with fp16: give only one"),
        ({"optim": "lomo"}, "optim lomo: its memory is unknown; supported are "),
        ({"trainable": "nothing"}, "trainable nothing: no parameter of GPT2LMHeadModel has this name; "),
        ({"device": "h1000"}, "device h1000: allowed: H100, "),
        ({"budget": "24"}, "budget 24: a number needs a unit"),
        ({"budget": "1MiB"}, "budget 1MiB: infeasible: "),
        ({"plan_file": "missing.json"}, "plan file missing.json: No such file"),
        ({"example_inputs": ()}, "example_inputs: only for a torch.nn.Module; leave them out"),
    ],
)
def test_a_mistake_is_one_line(folder, arguments: dict, line: str) -> None:
    with pytest.raises(MemOptError) as caught:
        plan(**{"model": folder, "seq_len": 24, **arguments})
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


NUMBERS, STRINGS = [True, 3, 10**30, 10**5000, 1.5, float("nan")], ["x", "", "x\0\n", "9" * 5000]
OTHERS = [b"x", [3], {"a": 1}, torch.ones(2), torch.device("cpu"), Unprintable(), ["x" * 5000, 3]]
SIZES = [*STRINGS, *OTHERS, *(one for one in NUMBERS if one != 3)]
WRONG_TYPES = {
    "batch_size": SIZES,
    "seq_len": SIZES,
    "gradient_accumulation_steps": [None, *SIZES],
    "task": [*STRINGS, *OTHERS, *NUMBERS],
    "device": [*STRINGS, *OTHERS, *NUMBERS],
    "optim": [None, *STRINGS, *OTHERS, *NUMBERS],
    "trainable": [None, *STRINGS, *OTHERS, *NUMBERS, "x,y,z", ["x" * 5000, "y" * 5000]],
    "bf16": [None, *STRINGS, *OTHERS, *NUMBERS[1:]],
    "fp16": [None, *STRINGS, *OTHERS, *NUMBERS[1:]],
    "budget": [*STRINGS, *OTHERS, *NUMBERS, "9" * 400 + "GiB", "2000000TiB"],
    "level": [None, *STRINGS, *OTHERS, *NUMBERS[2:]],
    "compiler": [*STRINGS, *OTHERS, *NUMBERS],
    "example_inputs": [*STRINGS, *OTHERS, *NUMBERS],
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_value_of_a_wrong_type_is_one_line_that_names_it(folder, name: str) -> None:
    for value in WRONG_TYPES[name]:
        with pytest.raises(MemOptError) as caught:
            plan(**{"model": folder, "seq_len": 24, name: value})
        line = str(caught.value)
        assert name in line and line.isprintable() and len(line) <= 300


def test_a_device_file_may_be_a_path(folder, tmp_path) -> None:
    path = tmp_path / "device.json"
    rates = {"memory": 2**34, "bandwidth": 1e12, "flops": {"float32": 1e13}, "link": 1e10}
    path.write_text(json.dumps({"name": "own", **rates}))
    header = plan(folder, seq_len=8, device=path, compiler="aot_eager").table.header[0]
    assert header.startswith("GPT2LMHeadModel in float32 on own")


@in_turn
def test_a_device_file_may_be_one_of_cuda(folder, tmp_path) -> None:
    """A device file may describe a CUDA device: with a T4's numbers the step is the T4's, with its attention kernel,
    workspaces and allocator."""
    path = tmp_path / "device.json"
    rates = {"memory": 2**34, "bandwidth": 3.2e11, "flops": {"float32": 8.1e12, "float16": 6.5e13}, "link": 1.6e10}
    cuda = {"capability": "7.5", "multiprocessors": 40, "threads": 1024}
    found = []
    for device in (path, "T4"):
        path.write_text(json.dumps({"name": "own", **rates, "cuda": cuda}))
        estimate = plan(folder, seq_len=64, device=device, fp16=True, compiler="aot_eager")
        found.append((estimate.peak, estimate.reserved, estimate.table.header[0].replace("T4", "own")))
    assert found[0] == found[1] and found[0][1] is not None


def test_the_task_is_that_of_the_class(tmp_path, config) -> None:
    unnamed = copy.deepcopy(config)
    unnamed.architectures = None
    with pytest.raises(MemOptError, match="task: the config names no class that implies it; give one of text-class"):
        plan(unnamed)
    unnamed.architectures = ["GPT2Model"]
    with pytest.raises(MemOptError, match="task: GPT2Model does not imply it; give one of"):
        plan(unnamed)


@in_turn
def test_a_model_that_computes_rates_while_it_is_built() -> None:
    sizes = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "image_size": 16, "patch_size": 2}
    rates = transformers.ConvNextConfig(**sizes, drop_path_rate=0.1)
    header = plan(rates, task="image-classification", batch_size=2).table.header[0]
    assert header.startswith("ConvNextForImageClassification in float32 on cpu by aot_eager, no plan")


def test_a_parameter_that_is_no_plain_tensor_and_a_model_in_training() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with pytest.raises(MemOptError, match="Sequential: 0._parameters is a UninitializedParameter; only plain tensors"):
        plan(lazy, example_inputs=torch.ones(2, 3))
    model = Classifier()
    engine = optimum_memopt.optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager")
    with pytest.raises(MemOptError, match="Classifier is being trained by an engine; detach"):
        plan(model, example_inputs=torch.ones(2, 64))
    engine.detach()


def test_a_plan_can_be_written_and_shown(found: Estimate, tmp_path) -> None:
    found.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["solved_for"]["device"] == "H100"
    page = found._repr_html_()
    assert "Predicted peak of a step" in page and "activations" in page and page.count("<table>") == 2
    assert str(found).startswith("Memory plans of the compile engine")
    assert repr(found).startswith("Estimate(peak=")


@in_turn
def test_the_curve_is_there_when_it_is_asked_for() -> None:
    curve = of_stack(4096).curve
    assert len(curve) == 10
    assert curve[0].peak < curve[-1].peak and curve[0].extra_seconds > curve[-1].extra_seconds == 0


@pytest.mark.parametrize(("most", "start"), [(0, 1), (1, 1), (7, 2), (7, 7), (7, 8), (7, 100), (64, 8), (1000, 3)])
def test_the_largest_number_that_fits(most: int, start: int) -> None:
    asked = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= most

    assert largest(fits, start, limit=200) == min(most, 200)
    assert len(asked) == len(set(asked)) < 20


def test_workloads_of_another_batch_size(folder) -> None:
    assert Workload(folder, "text-generation", 8).with_rows(3).batch_size == 3
    inputs = {"pixels": torch.rand(4, 64), "offset": 2.0}
    workload = ModuleWorkload.of(Classifier(), inputs, None, ()).with_rows(9)
    assert (workload.batch_size, workload.inputs["pixels"].shape, workload.inputs["offset"]) == (9, (9, 64), 2.0)


# Prints the memory of a process besides tensors, mostly imports.
PROCESS = """
import sys, torch, transformers, optimum_memopt
config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
if sys.argv[1] == "plan":
    planned = optimum_memopt.plan(config, "text-generation", batch_size=2, seq_len=8, compiler="aot_eager")
    print("other", planned.breakdown["other"])
else:
    model = transformers.GPT2LMHeadModel(config)
    engine = optimum_memopt.optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager")
    ids = torch.ones(2, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids)
    print("other", engine.predictor.footprint().constant)
"""


@pytest.mark.nightly
def test_the_process_that_plans_holds_what_one_that_trains_does() -> None:
    def other(what: str) -> int:
        done = subprocess.run([sys.executable, "-c", PROCESS, what], capture_output=True, text=True, timeout=300)
        return int(done.stdout.split("other ")[1].split()[0])

    assert other("plan") == pytest.approx(other("train"), rel=0.08)


class OfDict(torch.nn.Module):
    """A model whose forward takes a dict, and a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.stack(batch["pixels"] + sum(batch["offsets"]))


def test_inputs_in_containers_count_as_others_do() -> None:
    pixels = torch.empty(8, 64)
    plain = plan(Stack(), example_inputs=pixels, **ON_H100)
    given = {"batch": {"pixels": pixels, "offsets": [pixels.clone(), pixels.clone()]}}
    found = plan(OfDict(), example_inputs=given, **ON_H100)
    assert found._found.parts["batch"] == 3 * plain._found.parts["batch"]
    more = plan(OfDict(), example_inputs=given, batch_size=16, **ON_H100)
    assert more._found.parts["batch"] == 6 * plain._found.parts["batch"]
