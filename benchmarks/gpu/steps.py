"""Models on a GPU, their training steps, and the steps' memory in torch's allocator, for gpu/acceptance.py."""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from torch.utils._python_dispatch import TorchDispatchMode

from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.simulator.workspaces import operator_workspace
from optimum_memopt.engines.torch_compat.kernels import multiprocessors_of
from optimum_memopt.options import from_keywords, resolve

MIB = 2**20
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Lower bound of a gradient, relative to the model's mean one: the bias of an attention's key has nothing but noise.
_FLOOR = 1e-2
_EXCESS = 4096
# Number of processes that may hold a whole step at the same time.
_PLACES = 3

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batch."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    batch: int
    length: int

    def config(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.length + 2,
        }


TINY = Shape(layers=1, hidden=64, heads=2, intermediate=128, vocabulary=256, batch=2, length=64)
SMALL = Shape(layers=2, hidden=256, heads=4, intermediate=1024, vocabulary=4096, batch=8, length=128)
BASE = Shape(layers=6, hidden=768, heads=12, intermediate=3072, vocabulary=8192, batch=16, length=512)


# Relative attention of DeBERTa-v2-xlarge.
RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}


def roberta(shape: Shape, dropout: float) -> torch.nn.Module:
    config = transformers.RobertaConfig(
        **shape.config(), hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return transformers.RobertaForMaskedLM(config)


def deberta(shape: Shape, dropout: float) -> torch.nn.Module:
    config = transformers.DebertaV2Config(
        **shape.config(), hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **RELATIVE
    )
    return transformers.DebertaV2ForMaskedLM(config)


def llama(shape: Shape, dropout: float) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        **shape.config(), num_key_value_heads=max(1, shape.heads // 4), attention_dropout=dropout, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[Shape, float], torch.nn.Module]] = {
    "roberta": roberta,
    "deberta-v2": deberta,
    "llama": llama,
}


def build(name: str, shape: Shape, dropout: float = 0.0) -> torch.nn.Module:
    """Returns a model of `MODELS`; see `made`."""
    return made(lambda: MODELS[name](shape, dropout))


def made(make: Callable[[], torch.nn.Module], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Returns a model on the GPU in training mode, with the same weights each time.

    Args:
        make: builds the model.
        dtype: the dtype of its weights.
    """
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return make().train()
    finally:
        torch.set_default_dtype(before)


def batch_of(shape: Shape, padding: int = 0) -> Batch:
    """Returns random tokens, the same each time.

    Args:
        shape: the batch's sizes and the vocabulary.
        padding: number of padding tokens at the end of the first row.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, shape.vocabulary, (shape.batch, shape.length), generator=generator).cuda()
    mask = torch.ones_like(ids)
    mask[0, shape.length - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def planned(model: torch.nn.Module, dynamic: bool = False, **options: Any) -> CompileEngine:
    """Attach the compile engine for steps that do not read the logits.

    Args:
        model: a model on the GPU.
        dynamic: whether any batch size runs without a recompile, as for users; tracing takes several times as long.
        options: fields of `MemOptOptions`, without the prefix `memory_opt_`.

    Raises:
        MemOptError: an option is invalid.
    """
    given = from_keywords(memory_opt_engine="compile", **{f"memory_opt_{name}": options[name] for name in options})
    given.check()
    selection = resolve(given).selection
    engine = CompileEngine(selection, given.memory_opt_compiler, dynamic, given.memory_opt_loss)
    engine.outputs_read_by = lambda: ""
    engine.attach(model)
    return engine


def outputs_of(model: torch.nn.Module, batch: Batch, dtype: str) -> Any:
    kind = DTYPES[dtype]
    with torch.autocast("cuda", kind) if kind is not None else contextlib.nullcontext():
        return model(**batch)


def forward(model: torch.nn.Module, batch: Batch, dtype: str) -> torch.Tensor:
    loss: torch.Tensor = outputs_of(model, batch, dtype).loss
    return loss


def gradients(model: torch.nn.Module, batch: Batch, dtype: str = "fp32") -> dict[str, torch.Tensor]:
    """Returns the gradients of one step by parameter name; parameters without a gradient are left out."""
    model.zero_grad(set_to_none=True)
    forward(model, batch, dtype).backward()
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def largest_error(ours: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Returns the highest relative error of a parameter's gradient, infinity if one is missing."""
    if ours.keys() != expected.keys():
        return float("inf")
    squares = sum(float(gradient.double().square().sum()) for gradient in expected.values())
    mean = (squares / sum(gradient.numel() for gradient in expected.values())) ** 0.5
    errors = [
        float((ours[name] - reference).double().norm())
        / max(float(reference.double().norm()), _FLOOR * mean * reference.numel() ** 0.5, 1e-30)
        for name, reference in expected.items()
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")


def error_of_all(ours: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Returns the relative error of all gradients together, infinity if one is missing."""
    if ours.keys() != expected.keys():
        return float("inf")
    apart = sum(float((ours[name] - reference).double().square().sum()) for name, reference in expected.items())
    whole = sum(float(reference.double().square().sum()) for reference in expected.values())
    return (apart / max(whole, 1e-30)) ** 0.5


@dataclass(frozen=True)
class Held:
    """The peak of a step, in bytes, and its time.

    Attributes:
        requested: bytes of all tensors.
        allocated: bytes of the blocks that the tensors lie in.
        reserved: bytes of device memory that the allocator reserved.
        seconds: median time of a step.
    """

    requested: int
    allocated: int
    reserved: int
    seconds: float


@contextlib.contextmanager
def room() -> Iterator[None]:
    """Limit how many processes take much of the device's memory at the same time."""
    folder = Path(os.environ.get("MEMOPT_GPU_FOLDER", tempfile.gettempdir()))
    while True:
        for place in range(_PLACES):
            with contextlib.suppress(Timeout), FileLock(folder / f"room{place}.lock", timeout=0):
                yield
                return
        time.sleep(0.1)


@contextlib.contextmanager
def on_host(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Move a model and its optimizer's states to the host, so that other processes can use the device."""

    def move(device: str) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(device)
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[name] = value.to(device)

    torch.cuda.synchronize()
    move("cpu")
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        move("cuda")


def train(
    model: torch.nn.Module, batch: Batch, dtype: str, optimizer: torch.optim.Optimizer, steps: int = 5, warm: int = 2
) -> Held:
    """Run steps with an optimizer, and measure them except the first `warm` ones, which compile."""
    for _ in range(warm):
        _step(model, batch, dtype, optimizer)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        _step(model, batch, dtype, optimizer)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    stats = torch.cuda.memory_stats()
    peaks = (stats[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved"))
    return Held(*peaks, statistics.median(seconds))


def _step(model: torch.nn.Module, batch: Batch, dtype: str, optimizer: torch.optim.Optimizer) -> None:
    forward(model, batch, dtype).backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def offload_config(rows: Iterable[Any]) -> str:
    """Returns the config that offloads all activations of a plan table (strategy 3)."""
    ids = dict.fromkeys(row.config.split(":")[0] for row in rows)
    return ",".join(f"{cluster}:3:-1" for cluster in ids if cluster != "Loss+")


@dataclass(frozen=True)
class Call:
    """An operator with a workspace, in bytes."""

    name: str
    measured: int
    predicted: int


class OperatorBuffers(TorchDispatchMode):
    """Compares the workspaces of operators with the predicted ones.

    Attributes:
        calls: the operators with a measured or predicted workspace.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._processors = multiprocessors_of(torch.device("cuda", torch.cuda.current_device()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        result = func(*args, **(kwargs or {}))
        stats = torch.cuda.memory_stats()
        measured = stats["requested_bytes.all.peak"] - max(before, stats["requested_bytes.all.current"])
        predicted = int(operator_workspace(func, args, result, self._processors))
        if max(measured, predicted) > _EXCESS:
            self.calls.append(Call(str(func), measured, predicted))
        return result


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic kernels where torch has them; other kernels only warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
