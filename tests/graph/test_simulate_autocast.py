"""`simulate` of steps under autocast for an absent device, with gradient scalers and TorchScript."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

import optimum_memopt
from optimum_memopt import MemOptError
from optimum_memopt.engines.api.predictions import EagerSettings
from optimum_memopt.engines.compile.predict.plain_step import plain_step
from optimum_memopt.engines.simulator.devices import DEVICES
from optimum_memopt.engines.simulator.standins import eager_standin
from optimum_memopt.engines.torch_compat import autocast
from optimum_memopt.predict.workload import Workload
from optimum_memopt.step_settings import StepSpec

HALF = torch.bfloat16
HERE = "this machine has CUDA, where nothing turns autocast off"
Context = Callable[[], contextlib.AbstractContextManager[Any]]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64))


def step(model: nn.Module, x: torch.Tensor, context: Context = contextlib.nullcontext) -> None:
    with context():
        loss = model(x).float().square().mean()
    loss.backward()


def peak(context: Context = contextlib.nullcontext) -> int:
    """Returns the peak without the memory of libraries."""
    return optimum_memopt.simulate(step, net(), torch.ones(4096, 64), context).peak - DEVICES["H100"].libraries


@contextlib.contextmanager
def switched() -> Iterator[None]:
    torch.set_autocast_dtype("cuda", HALF)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


@contextlib.contextmanager
def nested() -> Iterator[None]:
    with torch.autocast("cuda", torch.float16), torch.autocast("cuda", enabled=False), torch.autocast("cuda", HALF):
        yield


@contextlib.contextmanager
def behind_another() -> Iterator[None]:
    with torch.autocast("cuda", HALF):
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda")
        yield


@contextlib.contextmanager
def turned_off() -> Iterator[None]:
    with torch.autocast("cuda", HALF), torch.autocast("cuda", enabled=False):
        yield


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cuda", HALF),
        lambda: torch.autocast("cuda"),
        lambda: torch.autocast("xpu", HALF),
        lambda: torch.amp.autocast("cuda", dtype=HALF, cache_enabled=True),
        lambda: torch.cuda.amp.autocast(dtype=HALF),
        switched,
        nested,
        behind_another,
    ],
)
@pytest.mark.filterwarnings("ignore:.*autocast.*deprecated:FutureWarning")
def test_autocast_of_any_device_is_that_of_the_planned_one(context: Context) -> None:
    assert peak(context) == peak(lambda: torch.autocast("cpu", HALF)) < 0.9 * peak()


@pytest.mark.parametrize("context", [lambda: torch.autocast("cuda", enabled=False), turned_off])
def test_autocast_that_is_off(context: Context) -> None:
    assert peak(context) == peak()


def test_a_decorated_function() -> None:
    def decorated(model: nn.Module, x: torch.Tensor) -> None:
        torch.autocast("cuda", HALF)(lambda: model(x).float().square().mean())().backward()

    found = optimum_memopt.simulate(decorated, net(), torch.ones(4096, 64))
    assert found.peak - DEVICES["H100"].libraries == peak(lambda: torch.autocast("cpu", HALF))


@pytest.mark.skipif(torch.cuda.is_available(), reason=HERE)
@pytest.mark.filterwarnings("ignore:.*Disabling autocast:UserWarning")
def test_an_object_that_was_made_before(capsys: pytest.CaptureFixture[str]) -> None:
    made, of_default = torch.autocast("cuda", HALF), torch.autocast("cuda")

    @torch.autocast("cuda", HALF)
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()

    expected = peak(lambda: torch.autocast("cpu", HALF))
    assert peak(lambda: made) == expected
    found = optimum_memopt.simulate(lambda model, x: forward(model, x).backward(), net(), torch.ones(4096, 64))
    assert found.peak - DEVICES["H100"].libraries == expected
    line = 'torch.autocast("cuda") in bfloat16 is simulated as on: it was created before the step'
    assert capsys.readouterr().err.count(line) == 2
    assert peak(lambda: of_default) == peak()
    assert "float16 is simulated as off" in capsys.readouterr().err
    with made:
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason=HERE)
@pytest.mark.filterwarnings("ignore:.*Disabling autocast:UserWarning")
def test_this_machine_has_its_own_autocast() -> None:
    asked: list[bool] = []

    def here(x: torch.Tensor) -> None:
        with torch.autocast("cuda", HALF):
            asked.append(torch.is_autocast_enabled("cuda"))

    optimum_memopt.simulate(here, torch.ones(1), device=None)
    assert not any(asked)


def test_what_a_step_asks() -> None:
    answers: list[Any] = []

    def asks(x: torch.Tensor) -> None:
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")
        with torch.autocast("cuda", HALF):
            within = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")
        answers.append((before, within, torch.get_autocast_dtype("cuda"), torch.cuda.is_bf16_supported()))

    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled
    optimum_memopt.simulate(asks, torch.ones(1))
    assert set(answers) == {((False, torch.float16, torch.bfloat16), (True, True, HALF), torch.float16, True)}
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled) == before


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_autocast_enabled("cuda")
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_functions_with_casts_of_their_own() -> None:
    dtypes: set[torch.dtype] = set()

    def casts(x: torch.Tensor) -> None:
        with torch.autocast("cuda", HALF):
            result = Cast.apply(x @ x)
        dtypes.add(result.dtype)
        result.sum().backward()

    optimum_memopt.simulate(casts, torch.ones(8, 8, requires_grad=True))
    assert dtypes == {torch.float32}


def test_cross_entropy_saves_what_it_is_given() -> None:
    """On CUDA, cross entropy keeps the logits' dtype for its softmax; a CPU's autocast makes it float32."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", HALF):
            nn.functional.cross_entropy(logits * 1, labels).backward()

    rows, vocabulary = 512, 4096
    logits = torch.ones(rows, vocabulary, dtype=HALF, requires_grad=True)
    found = optimum_memopt.simulate(loss, logits, torch.zeros(rows, dtype=torch.int64))
    size = logits.nbytes
    # Logits, their gradient, the softmax, and float32 for the loss and its gradient.
    assert found.phases["backward"] - DEVICES["H100"].libraries == pytest.approx((1 + 1 + 1 + 2 + 2) * size, rel=0.01)


def test_a_trainer_has_outputs_in_float32() -> None:
    """The prediction of `plan` includes accelerate's float32 copy of the logits, unlike autocast alone."""
    config = transformers.RobertaConfig(vocab_size=20000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        model = transformers.RobertaForMaskedLM(config).train()

    def masked(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, is_trainer: bool) -> None:
        forward = torch.autocast("cuda", HALF)(model.forward)
        (convert_outputs_to_fp32(forward) if is_trainer else forward)(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    ids = torch.full((16, 128), 5)
    mask = torch.ones_like(ids)
    mask[0, -8:] = 0
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer, alone = (optimum_memopt.simulate(masked, model, optimizer, batch, each).peak for each in (True, False))
    spec = StepSpec("h100", bf16=True, optim="adamw_torch_fused")
    planned = plain_step(Workload(config, "fill-mask", 16, 128), spec, EagerSettings())
    assert planned.peak == pytest.approx(trainer, rel=0.005)
    assert trainer - alone == pytest.approx(ids.numel() * config.vocab_size * HALF.itemsize, rel=0.05)


_MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": autocast._in_half,
    "AT_FORALL_FP32": autocast._in_float32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": autocast._to_float32,
    "AT_FORALL_PROMOTE": autocast._in_widest,
}


def listed(macro: str) -> list[str]:
    """Returns the operators of a list in torch's header."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not header.is_file():
        pytest.skip("torch has no headers here")
    entries = header.read_text().partition(f"#define {macro}(_)")[2].partition("\n\n")[0]
    return [".".join(each.split(", ")) for each in re.findall(r"_\(([\w, ]+)\)", entries)]


@pytest.mark.parametrize("macro", _MACROS)
def test_casts_are_those_of_torchs_header(macro: str) -> None:
    """Casts follow torch's header; a CPU's own kernel stays only if it has the same policy."""
    assert listed(macro)
    kernels = autocast._kernels()
    for name in listed(macro):
        if (kernel := kernels.get(name)) is not None:
            (cast,) = [cell.cell_contents for cell in kernel.__closure__ if cell.cell_contents in _MACROS.values()]
            assert cast is _MACROS[macro], name
        else:
            assert _MACROS[macro] in (autocast._in_half, autocast._in_float32), name


def test_dtypes_under_autocast() -> None:
    x, wide = torch.ones(4, 4, dtype=HALF), torch.ones(4, 4)
    with eager_standin(DEVICES["H100"]), torch.autocast("cuda", HALF):
        assert x.norm(dim=-1).dtype == x.norm().dtype == torch.softmax(x, -1).dtype == torch.float32
        assert torch.log_softmax(x, -1, dtype=HALF).dtype == HALF
        assert torch.addcmul(wide, x, x).dtype == torch.float32
        assert torch.addcmul(x, x, x).dtype == torch.mv(wide, wide[0]).dtype == HALF
        assert nn.functional.interpolate(x[None, None], scale_factor=2).dtype == torch.float32


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not:UserWarning")
def test_a_gradient_scaler(is_given: bool, fused: bool) -> None:
    scales: list[float] = []

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, given: Any) -> None:
        scaler = given or torch.amp.GradScaler("cuda", init_scale=8.0)
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        step(model, x, lambda: torch.autocast("cuda", torch.float16))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model, x = net(), torch.ones(4096, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    given = torch.amp.GradScaler("cpu", init_scale=8.0) if is_given else None
    found = optimum_memopt.simulate(scaled, model, optimizer, x, given)
    assert found.peak == pytest.approx(optimum_memopt.simulate(plain, model, optimizer, x).peak, abs=16384)
    assert found.phases["optimizer"]
    assert set(scales) == {8.0}


@torch.jit.script
def clipped(x: torch.Tensor, most: int) -> torch.Tensor:
    """Clip large values like DeBERTa-v2's functions in transformers 5.17."""
    return torch.where(x > most, torch.tensor(most - 1).type_as(x), x)


def test_functions_of_torchscript() -> None:
    x = torch.ones(1000, requires_grad=True)
    found = optimum_memopt.simulate(lambda x: clipped(x, 3).sum().backward(), x)
    assert found.peak > DEVICES["H100"].libraries + 2 * x.nbytes
    assert clipped(x, 3).sum() == 1000


def test_a_module_of_torchscript() -> None:
    with pytest.raises(
        MemOptError, match="tensors of a TorchScript module cannot be replaced; pass the module that it was"
    ):
        optimum_memopt.simulate(step, torch.jit.script(nn.Linear(4, 4)), torch.ones(4, 4))
