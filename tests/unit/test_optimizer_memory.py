"""Predicted memory of optimizers against the optimizers that Trainer makes for the same names."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from allocations import allocated
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

from optimum_memopt.engines.compile.memory.footprint import state_sizes, step_bytes
from optimum_memopt.errors import MemOptError
from optimum_memopt.memory.optimizers import DEFAULT, PlannedOptimizer, check, planned_like, unknown

# Matrices, and parameters without decay, which Trainer puts into a group of their own.
SHAPES = ((300, 64), (64, 48), (512, 32), (48, 3, 20))
UNDECAYED = ((300,), (64,))
NAMES = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
# Step counts and scalar means.
SMALL = 64 * (len(SHAPES) + len(UNDECAYED))


def parameters_of(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.rand(shape).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    return parameters


def optimizer_of(name: str, path, dtype: torch.dtype = torch.float32, **more: bool) -> torch.optim.Optimizer:
    args = TrainingArguments(output_dir=str(path), optim=name, use_cpu=True, report_to=[])
    optimizer_class, arguments = Trainer.get_optimizer_cls_and_kwargs(args)
    groups = [{"params": parameters_of(SHAPES, dtype)}, {"params": parameters_of(UNDECAYED, dtype)}]
    return optimizer_class(groups, **{**arguments, **more})


def parameters_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    # In model order: parameters without decay are between the matrices.
    first, second = (group["params"] for group in optimizer.param_groups)
    return [first[0], second[0], first[1], second[1], *first[2:]]


CASES = [(name, torch.float32) for name in NAMES] + [("adafactor", torch.bfloat16), ("adamw_torch", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_states_and_the_step_are_those_of_trainers_optimizer(name: str, dtype: torch.dtype, tmp_path) -> None:
    optimizer = optimizer_of(name, tmp_path, dtype)
    optimizer.step()
    planned, parameters = PlannedOptimizer(name), parameters_in(optimizer)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    there = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor) and value.dim())
    assert sum(planned.state_sizes(parameters)) == there
    peak, left, _ = allocated(optimizer.step)
    assert left <= SMALL
    assert planned.step_bytes(parameters) == pytest.approx(peak, rel=0.02, abs=SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_before_its_first_step_is_planned_by_its_class(name: str, tmp_path) -> None:
    optimizer = optimizer_of(name, tmp_path)
    planned = planned_like(optimizer)
    assert planned.name == (DEFAULT if name == "adamw_torch" else name)
    parameters = parameters_in(optimizer)
    expected = sum(planned.state_sizes(parameters))
    assert sum(state_sizes(optimizer, parameters)) == expected
    # Wrapped as by accelerate.
    assert planned_like(SimpleNamespace(optimizer=optimizer)).name == planned.name
    optimizer.step()
    assert sum(state_sizes(optimizer, parameters)) == expected
    peak, _, _ = allocated(optimizer.step)
    assert step_bytes(optimizer, parameters) == pytest.approx(peak, rel=0.02, abs=SMALL)


ADDING: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "centered": lambda given: torch.optim.RMSprop(given, centered=True),
    "centered, momentum": lambda given: torch.optim.RMSprop(given, centered=True, momentum=0.9),
    "first moment": lambda given: Adafactor(given, beta1=0.9),
    "Adam, amsgrad": lambda given: torch.optim.Adam(given, amsgrad=True),
    "AdamW, amsgrad in a group": lambda given: torch.optim.AdamW([{"params": given, "amsgrad": True}]),
}


@pytest.mark.parametrize("option", ADDING)
def test_states_that_options_add(option: str) -> None:
    given = parameters_of(SHAPES, torch.float32)
    optimizer = ADDING[option](given)
    planned = sum(planned_like(optimizer).state_sizes(given))
    optimizer.step()
    assert planned == sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )


def test_other_optimizers_are_planned_as_adamw() -> None:
    assert planned_like(torch.optim.Adadelta(parameters_of(SHAPES, torch.float32))) == PlannedOptimizer(DEFAULT)
    assert planned_like(None).name == DEFAULT


@pytest.mark.parametrize("name", ["adamw_torch", "adagrad", "rmsprop", "sgd"])
def test_the_step_on_cuda_takes_all_parameters_at_once(name: str, tmp_path) -> None:
    """The step is predicted with `foreach`, torch's default on CUDA, which also works on a CPU."""
    optimizer = optimizer_of(name, tmp_path, foreach=True)
    optimizer.step()
    peak, _, _ = allocated(optimizer.step)
    planned = PlannedOptimizer(name, is_on_cuda=True)
    assert planned.step_bytes(parameters_in(optimizer)) == pytest.approx(peak, rel=0.02, abs=SMALL)


@pytest.mark.parametrize("name", ["adagrad", "rmsprop", "sgd"])
def test_weight_decay_on_cuda_copies_all_gradients(name: str, tmp_path) -> None:
    optimizer = optimizer_of(name, tmp_path, foreach=True, weight_decay=0.1)
    optimizer.step()
    peak, _, _ = allocated(optimizer.step)
    planned = planned_like(optimizer, is_on_cuda=True)
    assert planned.step_bytes(parameters_in(optimizer)) == pytest.approx(peak, rel=0.02, abs=SMALL)


def test_states_in_8_bits_have_a_scale_for_each_block() -> None:
    large, small = torch.empty(128, 65), torch.empty(4095)
    embedding = torch.nn.Embedding(128, 65)
    planned = PlannedOptimizer.of_model(embedding, "adamw_8bit", True)
    assert planned.state_sizes([large]) == [8320, 33 * 4] * 2
    assert planned.state_sizes([small]) == [4095 * 4] * 2
    assert planned.state_sizes([embedding.weight]) == [8320 * 4] * 2
    assert PlannedOptimizer("lion_8bit").state_sizes([large]) == [8320, 33 * 4]
    assert planned.step_bytes([large, small]) == 0


BNB = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit"),
    *("paged_lion_8bit", "paged_lion_32bit", "ademamix", "ademamix_8bit", "paged_ademamix_8bit"),
    *("paged_ademamix_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)


@pytest.mark.parametrize("name", BNB)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_states_of_bitsandbytes_are_those_that_it_makes(name: str, tmp_path) -> None:
    """States equal those of bitsandbytes, without the two 8-bit tables shared by all parameters."""
    pytest.importorskip("bitsandbytes")
    optimizer = optimizer_of(name, tmp_path)
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, number, place)
    sizes = PlannedOptimizer(name).state_sizes
    for parameter in parameters_in(optimizer):
        states = optimizer.state[parameter].items()
        made = [state.nbytes for key, state in states if isinstance(state, torch.Tensor) and "qmap" not in key]
        assert sorted(sizes([parameter])) == sorted(made)
    (first, *_) = parameters_in(optimizer)
    assert (optimizer.state[first]["state1"].dtype == torch.uint8) == ("8bit" in name)
    optimizer.state.clear()
    parameters = parameters_in(optimizer)
    assert planned_like(optimizer).state_sizes(parameters) == PlannedOptimizer(name).state_sizes(parameters)


def test_an_8_bit_optimizer_keeps_what_trainer_registers_in_32_bits(monkeypatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    embedding, head = torch.nn.Embedding(128, 65), torch.nn.Linear(65, 128)
    optimizer = bitsandbytes.optim.AdamW8bit([embedding.weight, head.weight])
    monkeypatch.setattr(optimizer.mng, "module_weight_config_triple", [(embedding, "weight", {"optim_bits": 32})])
    planned = planned_like(optimizer)
    assert planned.state_sizes([embedding.weight]) == [8320 * 4] * 2
    assert planned.state_sizes([head.weight]) == [8320, 33 * 4] * 2


PROJECTING = ("galore_adamw", "galore_adafactor", "galore_adamw_8bit", "apollo_adamw")
AVERAGING = ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd")
LIBRARIES = ("galore_torch", "apollo_torch", "schedulefree")


class Linears(torch.nn.Module):
    """Linear layers wider and narrower than the rank, in both directions, and parameters that are not projected."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(300, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*each) for each in ((64, 300), (512, 40), (192, 160)))
        self.norm = torch.nn.LayerNorm(700)
        self.to(dtype)
        for parameter in self.parameters():
            parameter.grad = torch.rand_like(parameter)


def of_library(name: str, path, model: torch.nn.Module) -> torch.optim.Optimizer:
    pytest.importorskip(next(each for each in LIBRARIES if each[:4] in name))
    args = TrainingArguments(
        output_dir=str(path),
        optim=name,
        optim_target_modules="all-linear",
        use_cpu=True,
        report_to=[],
        lr_scheduler_type="constant",
    )
    return Trainer(model, args).create_optimizer()


def stored(state: object) -> int:
    """Returns the bytes of a state's storages: of a tensor with several elements, or of a projector's."""
    if isinstance(state, torch.Tensor):
        return state.untyped_storage().nbytes() if state.numel() > 1 else 0
    projection = getattr(state, "ortho_matrix", None)
    return 0 if projection is None else projection.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*PROJECTING, *AVERAGING])
@pytest.mark.filterwarnings("ignore")
def test_states_of_libraries_are_those_that_they_make(name: str, dtype: torch.dtype, tmp_path, monkeypatch) -> None:
    # GaLore waits for the device after each 8-bit update.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = Linears(dtype)
    optimizer = of_library(name, tmp_path, model)
    getattr(optimizer, "train", int)()
    optimizer.step()
    planned, parameters = PlannedOptimizer.of_model(model, name), list(model.parameters())
    for parameter in parameters:
        states = {key: each for key, each in optimizer.state[parameter].items() if "qmap" not in key}
        assert sum(planned.state_sizes([parameter])) == sum(map(stored, states.values()))
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    peak, _, _ = allocated(optimizer.step)
    small = 1024 * len(parameters)
    if name in ("apollo_adamw", "galore_adafactor", *AVERAGING[:1]):
        assert planned.step_bytes(parameters) == pytest.approx(peak, rel=0.02, abs=small)
    elif name == "galore_adamw":
        # Not in each step: a decomposition.
        assert planned.step_bytes(parameters) >= peak - small


def test_all_known_optimizers_are_compared() -> None:
    parameters = parameters_of(SHAPES, torch.float32)
    first, *others = PlannedOptimizer("adafactor").compared(parameters)
    names = {*NAMES, *BNB, *PROJECTING, *AVERAGING}
    assert first.name == "adafactor" and names == {first.name, *(other.name for other in others)}
    for found in (first, *others):
        planned = PlannedOptimizer(found.name)
        assert found.states == sum(planned.state_sizes(parameters))
        assert found.temporaries == planned.step_bytes(parameters)
        # All optimizers except AdamW in float32 train differently.
        assert bool(found.remarks) != (found.name in ("adamw_torch", "adamw_torch_fused"))
    assert "galore_adamw_layerwise" in unknown() and not {found.name for found in others}.intersection(unknown())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("adamw_torchfused", "--optim adamw_torchfused: did you mean adamw_torch_fused? supported are "),
        ("paged_adamw_8bit", "--optim paged_adamw_8bit: its states move between host and device "),
        (
            "galore_adamw",
            "--optim galore_adamw: the time of its step is unknown, advise --optim all shows its memory; ",
        ),
        ("adalomo", "--optim adalomo: its memory is unknown; supported are adamw_torch_fused, "),
    ],
)
def test_what_is_not_known_is_refused(name: str, line: str) -> None:
    with pytest.raises(MemOptError) as caught:
        check(name)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_every_name_is_trainers() -> None:
    from transformers.training_args import OptimizerNames

    known = {name.value for name in OptimizerNames}
    with pytest.raises(MemOptError) as caught:
        check("none")
    assert set(str(caught.value).partition("supported are ")[2].split(", ")) <= known
