"""A step of plain PyTorch run on fake tensors, against the requests to torch's allocator in a real step."""

import itertools
from typing import Any

import pytest
import torch
from transformers import RobertaConfig

from optimum_memopt.compat.transformers import checkpoint_layers
from optimum_memopt.engines.api.predictions import GRADIENTS, OPTIMIZER, OUTPUTS, PARAMETERS, SAVED, EagerSettings
from optimum_memopt.engines.compile.predict.estimate import plain_ways
from optimum_memopt.engines.compile.predict.plain_step import plain_step
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.simulator.devices import DEVICES
from optimum_memopt.engines.simulator.live_run import BACKWARD, LiveRun
from optimum_memopt.engines.simulator.recorder import LiveRecorder
from optimum_memopt.engines.simulator.trainer_step import run_micro_batches
from optimum_memopt.engines.torch_compat import fake_tensors, kernels
from optimum_memopt.errors import MemOptError
from optimum_memopt.predict.workload import ModuleWorkload, Workload
from optimum_memopt.step_settings import StepSpec
from tests.model_zoo import ZOO
from tests.rotation import nightly

# Convolutions use workspaces that depend on the processor.
_CONVOLVES = {"vit", "patchtst", "wav2vec2", "hubert", "segformer", "swin", "qwen3-next"}
_NAMES = sorted(set(ZOO) - _CONVOLVES)
# An occasional empty tensor, whose storage takes 8 bytes.
_SLACK = 256


def measured(model: torch.nn.Module, batch: dict[str, Any], training: EagerSettings, micro_batches: int = 1) -> int:
    """Returns the most bytes that a real step requests in addition to the initial ones, after a first step."""

    def step() -> Any:
        for _ in range(micro_batches):
            inputs = batch if training.keeps_outputs else without_key_value_cache(model, (), batch)
            outputs = model(**inputs)
            loss = outputs["loss"]
            if not training.keeps_outputs:
                outputs = None
            loss.backward()
            del loss
        return outputs

    step()
    model.zero_grad()
    allocations = kernels.cpu_allocations(step)
    model.zero_grad()
    return max(itertools.accumulate(allocations, initial=0))


def predicted(
    model: torch.nn.Module, batch: dict[str, Any], training: EagerSettings, micro_batches: int = 1
) -> LiveRun:
    fake, copied = fake_tensors.fake_model(model)
    inputs = fake_tensors.fake_copy(batch, fake, keeps_values=True)
    with fake:
        return run_micro_batches(copied.train(), inputs, None, training, None, micro_batches)


def over_given(run: LiveRun) -> int:
    given, _ = run.split()
    return run.peak - sum(storage.bytes for storage in given)


@pytest.mark.parametrize("keeps_outputs", [False, True])
@pytest.mark.parametrize("name", nightly(_NAMES, but=["gpt2", "roberta-mlm", "t5"]))
def test_peak_is_that_of_the_allocator(name: str, keeps_outputs: bool) -> None:
    model, batch = ZOO[name].build().train(), ZOO[name].batch(4, 24)
    training = EagerSettings(keeps_outputs=keeps_outputs)
    assert over_given(predicted(model, batch, training)) == pytest.approx(measured(model, batch, training), abs=_SLACK)


@pytest.mark.parametrize("name", nightly(["roberta-mlm", "llama", "t5", "qwen2"], but=["roberta-mlm"]))
def test_checkpointing(name: str) -> None:
    model, batch = ZOO[name].build().train(), ZOO[name].batch(8, 60)
    plain = over_given(predicted(model, batch, EagerSettings()))
    checkpoint_layers(model, 1)
    here = over_given(predicted(model, batch, EagerSettings()))
    # Each checkpoint holds the CPU generator's state, which no operator allocates.
    states = 6 * torch.get_rng_state().nbytes
    assert here < plain
    assert here <= measured(model, batch, EagerSettings()) + _SLACK <= here + states + 2 * _SLACK


def test_gradients_add_up() -> None:
    model, batch = ZOO["roberta-mlm"].build().train(), ZOO["roberta-mlm"].batch(2, 8)
    run = predicted(model, batch, EagerSettings(), micro_batches=2)
    assert over_given(run) == pytest.approx(measured(model, batch, EagerSettings(), 2), abs=_SLACK)
    assert over_given(run) > over_given(predicted(model, batch, EagerSettings()))


class Uses(torch.nn.Module):
    """A hidden state whose gradients add up: autograd sums in place, a hook does not."""

    def __init__(self, uses: int, has_hook: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self._uses, self._has_hook = uses, has_hook

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.linear(x)
        if self._has_hook:
            hidden.register_hook(lambda gradient: gradient + gradient)
        return {"loss": sum((hidden * factor).sum() for factor in range(1, self._uses + 1))}


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("uses", [1, 2, 3])
def test_gradients_of_one_tensor_are_added_in_place(uses: int, has_hook: bool) -> None:
    model, batch = Uses(uses, has_hook), {"x": torch.randn(64, 64, 64)}
    here = over_given(predicted(model, batch, EagerSettings()))
    assert here == pytest.approx(measured(model, batch, EagerSettings()), abs=_SLACK)


class Picks(torch.nn.Module):
    """One score of each row; its gradient is put into zeros, in place on real tensors."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self._way = torch.nn.Linear(64, 512), way

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x)
        if self._way == "index":
            return {"loss": scores[torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)].sum()}
        if self._way == "index_select":
            return {"loss": scores.index_select(1, torch.tensor([0, 2])).sum()}
        if self._way == "gather":
            return {"loss": scores.gather(-1, torch.zeros(len(x), 1, dtype=torch.long)).sum()}
        return {"loss": scores.max(-1).values.sum()}


@pytest.mark.parametrize("way", ["gather", "max", "index", "index_select"])
def test_a_gradient_is_put_into_zeros_in_place(way: str) -> None:
    model, batch = Picks(way), {"x": torch.randn(256, 64)}
    here = over_given(predicted(model, batch, EagerSettings()))
    assert here == pytest.approx(measured(model, batch, EagerSettings()), abs=_SLACK)


def test_it_names_who_holds_what() -> None:
    model, batch = ZOO["llama"].build().train(), ZOO["llama"].batch(4, 24)
    timeline = predicted(model, batch, EagerSettings(keeps_outputs=True)).timeline({})
    groups = {(group.category, group.name) for group in timeline.alive}
    assert (OUTPUTS, "outputs.logits") in groups
    assert any(category == SAVED for category, _ in groups)
    assert (PARAMETERS, "float32") in groups
    assert timeline.peak_phase == "backward"
    assert max(timeline.held[GRADIENTS]) == sum(parameter.nbytes for parameter in model.parameters())


def test_a_variable_has_its_place() -> None:
    class Holds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            squares = x * x
            return self.linear(x).exp().sum() + squares.mean()

    model = Holds()

    def run(inspect_at: int) -> LiveRun:
        fake, copied = fake_tensors.fake_model(model)
        recorder = LiveRecorder(copied, inspect_at=inspect_at)
        with fake, recorder:
            copied(torch.ones(4, 8))
        return recorder.run()

    at = next(index for index, event in enumerate(run(-1).events) if event.kind == "exp")
    (squares,) = (s for e in run(at).events for s in e.allocates if s.category == OUTPUTS and "squares" in s.kind)
    assert "squares in forward" in squares.kind
    assert "test_live.py" in squares.kind


def test_a_value_that_is_read_is_a_line_with_the_place() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.linear(x)
            return {"loss": result.sum() if result.max() > 0 else result.mean()}

    with pytest.raises(MemOptError, match=r"the value of a tensor is read .*test_live\.py:\d+, in forward"):
        predicted(Reads(), {"x": torch.ones(4, 8)}, EagerSettings())


def test_random_numbers_without_inputs_have_values() -> None:
    class Drops(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            # Like PEFT's LoHa.
            return {"loss": self.linear(x).sum() if torch.rand(1) >= 0 else x.sum()}

    assert predicted(Drops(), {"x": torch.ones(4, 8)}, EagerSettings()).trained == {"linear.weight", "linear.bias"}


def test_on_a_gpu_that_is_not_here() -> None:
    config = RobertaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    step = plain_step(Workload(config, "fill-mask", 8, 64), StepSpec("h100", bf16=True), EagerSettings())
    assert step.allocator is not None
    assert step.peak <= step.allocator.allocated <= step.allocator.reserved
    timeline = step.timeline
    assert timeline.peak == step.peak
    assert timeline.held[OPTIMIZER][0] == 2 * timeline.held[PARAMETERS][0] - 2 * _buffers(config)
    assert {phase.name for phase in timeline.phases} >= {"post_forward", "post_backward"}
    assert BACKWARD in step.run.phases
    # transformers drops a mask without padding after looking at its values.
    without = plain_step(Workload(config, "fill-mask", 8, 64, padding=False), StepSpec("h100"), EagerSettings())
    masks = [storage for event in step.run.events for storage in event.allocates if storage.kind == "bitwise_and"]
    assert masks
    assert not any(storage.kind == "bitwise_and" for event in without.run.events for storage in event.allocates)


def test_seconds_are_those_of_kernels() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8192, 8192, bias=False), torch.nn.ReLU())
    batch = {"input": torch.ones(8192, 8192)}
    names = ["mm", "relu", "sum", "threshold_backward", "mm"]
    workload = ModuleWorkload.of(layer, batch, None, ())
    step = plain_step(workload, StepSpec("l40s"), EagerSettings())
    assert [work.key.split(".")[1] for work in step.run.calls if work.bytes > 2**20] == names
    assert step.seconds is not None
    products = sum(work.flops for work in step.run.calls) / DEVICES["L40S"].flops["float32"]
    assert products < step.seconds < 2 * products
    # Gradients are added three times, and each parameter is updated once: both only move bytes.
    times = plain_step(workload, StepSpec("l40s", gradient_accumulation_steps=4), EagerSettings())
    assert times.seconds is not None
    passes = 3 * 8192**2 * 4 / DEVICES["L40S"].memory_rate
    update = (2 + 2 * 2 + 1 + 3) / 3 * passes
    assert times.seconds - 4 * (step.seconds - update) == pytest.approx(3 * passes + update)
    foreach = plain_step(workload, StepSpec("l40s", optim="adamw_torch"), EagerSettings())
    assert foreach.seconds == pytest.approx(step.seconds + (3 + 21) / 3 * passes - update)


def test_checkpointing_takes_longer() -> None:
    config = RobertaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    plain, checkpointing = plain_ways(Workload(config, "fill-mask", 8, 64), StepSpec("l40s"))
    assert plain.seconds is not None
    assert checkpointing.seconds is not None
    assert plain.seconds < checkpointing.seconds < 1.5 * plain.seconds


def test_no_seconds_without_a_device() -> None:
    layer = torch.nn.Linear(8, 8)
    step = plain_step(ModuleWorkload.of(layer, {"input": torch.ones(4, 8)}, None, ()), StepSpec(), EagerSettings())
    assert step.seconds is None
    assert not step.run.calls


def _buffers(config: RobertaConfig) -> int:
    from transformers import RobertaForMaskedLM

    with torch.device("meta"):
        return sum(buffer.nbytes for buffer in RobertaForMaskedLM(config).buffers())
