"""Predicts the memory of optimizers before they exist, by Trainer's names (`--optim`).

States and temporary tensors are those with Trainer's default arguments: no momentum for SGD and RMSprop, no first
moment for Adafactor, rank 128 for GaLore and APOLLO. Follows `torch/optim` (2.13), `transformers/optimization.py`
(5.23), `bitsandbytes/optim/optimizer.py` (0.48), schedulefree (1.4), galore-torch (1.0) and apollo-torch (1.0).
"""

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimum_memopt.compat import bitsandbytes
from optimum_memopt.compat.installed import installed_version
from optimum_memopt.errors import QUOTED, MemOptError, excerpt

DEFAULT = "adamw_torch_fused"
_FLOAT32 = 4
# bitsandbytes: parameters with fewer elements have float32 states, larger ones 8-bit states with a scale per block.
_LEAST_IN_8_BITS = 4096
_BLOCK = 256
# GaLore and APOLLO: the rank of projected gradients.
_RANK = 128
_HALVES = (torch.bfloat16, torch.float16)
# Passes over the gradients for clipping: read for the norm, then read and written.
_CLIPPING = 3
_States = Callable[[torch.Tensor], list[int]]
# Takes the parameters, and whether they are on CUDA; returns the bytes of a step's temporary tensors.
_Step = Callable[[Sequence[torch.Tensor], bool], int]


def _copying(loop: int = 0, foreach: int = 0) -> _Step:
    """Returns a function for the temporary bytes of a step that copies parameters.

    Args:
        loop: number of copies of a parameter, if the step takes one parameter after the other.
        foreach: number of copies of all parameters that the step makes on CUDA.
    """

    def step(parameters: Sequence[torch.Tensor], is_on_cuda: bool) -> int:
        if is_on_cuda and foreach:
            return foreach * _bytes_of_all(parameters)
        if not loop:
            return 0
        sizes = [0, *(parameter.nbytes for parameter in parameters)]
        # The last copy of a parameter lives until the next parameter's copy is made.
        return max((before + loop * size for before, size in itertools.pairwise(sizes)), default=0)

    return step


_WITHOUT_COPIES = _copying()


def _bytes_of_all(parameters: Sequence[torch.Tensor], is_on_cuda: bool = True) -> int:
    return sum(parameter.nbytes for parameter in parameters)


@dataclass(frozen=True)
class _Kind:
    """The memory of an optimizer.

    Attributes:
        states: returns the bytes of each state of a parameter.
        step: returns the bytes of a step's temporary tensors.
        of_embeddings: as `states`, for embeddings; None: no difference.
        of_products: as `states`, for the weights of linear layers; None: no difference.
        remarks: how the update differs from AdamW's in float32, and what is not exact.
    """

    states: _States
    step: _Step = _WITHOUT_COPIES
    of_embeddings: _States | None = None
    of_products: _States | None = None
    remarks: tuple[str, ...] = ()


def _copies(count: int) -> _States:
    """Returns a function for the sizes of `count` states with the parameter's shape and dtype."""
    return lambda parameter: [parameter.nbytes] * count


def _in_32_bits(count: int) -> _States:
    return lambda parameter: [parameter.numel() * _FLOAT32] * count


def _in_8_bits(count: int) -> _States:
    def states(parameter: torch.Tensor) -> list[int]:
        size = parameter.numel()
        if size < _LEAST_IN_8_BITS:
            return [size * _FLOAT32] * count
        return [size, -(-size // _BLOCK) * _FLOAT32] * count

    return states


def _of_ademamix(in_8_bits: bool) -> _States:
    """Returns a function for the sizes of AdEMAMix's states: a fast and a slow first moment in one state, and a second
    moment (`bitsandbytes/optim/ademamix.py`, 0.50)."""
    moment = _in_8_bits(1) if in_8_bits else _in_32_bits(1)

    def states(parameter: torch.Tensor) -> list[int]:
        return [times * size for size in moment(parameter) for times in (2, 1)]

    return states


def _factored(parameter: torch.Tensor) -> list[int]:
    """Returns the sizes of Adafactor's states: a mean for each row and column of a matrix."""
    size = parameter.numel() * _FLOAT32
    if parameter.dim() < 2:
        return [size]
    return [size // parameter.shape[-1], size // parameter.shape[-2]]


def _adafactor_step(parameters: Sequence[torch.Tensor], is_on_cuda: bool) -> int:
    """Returns the peak bytes of an Adafactor step, which computes in float32: the squared gradient and its sum with
    epsilon, while the previous parameter's update is alive; for a parameter in half precision also float32 copies of
    it and its gradient."""
    peak = before = 0
    for parameter in parameters:
        size = parameter.numel() * _FLOAT32
        casts = 2 * size if parameter.dtype in _HALVES else 0
        factors = sum(_factored(parameter)) if parameter.dim() > 1 else 0
        peak = max(peak, before + casts + 2 * size, casts + 2 * size + factors)
        before = size
    return peak


def _galore(states: _States, is_in_float32: bool = False) -> _States:
    """Returns a function for the sizes of GaLore's states of a linear layer's weight: the projection of the gradient
    along the weight's shorter side, and `states` of the projected gradient (`galore_torch/galore_projector.py`).

    Args:
        is_in_float32: gradients in half precision are cast to float32.
    """

    def of_product(weight: torch.Tensor) -> list[int]:
        (short, long), dtype = sorted(weight.shape), torch.float32 if is_in_float32 else weight.dtype
        rank = min(_RANK, short)
        # In float32 the projection is a view of all singular vectors.
        projection = short * (rank if dtype in _HALVES else short) * dtype.itemsize
        return [projection, *states(torch.empty(rank, long, dtype=dtype, device="meta"))]

    return of_product


def _apollo(weight: torch.Tensor) -> list[int]:
    """Returns the sizes of APOLLO's states of a linear layer's weight: the projection, and two moments of the
    projected gradient (`apollo_torch/apollo.py`)."""
    short, long = sorted(weight.shape)
    return [_RANK * size * weight.itemsize for size in (short, long, long)]


def _low_rank_step(copies: int, is_in_float32: bool = False, decomposes: bool = False) -> _Step:
    """Returns a function for the temporary bytes of GaLore's and APOLLO's steps, which take one weight after the
    other: `copies` of its projected gradient, and two of the update.

    Args:
        is_in_float32: as for `_galore`; the weight is cast, too.
        decomposes: some steps instead hold a gradient's copy and its singular vectors, in float32.
    """

    def of(parameter: torch.Tensor) -> int:
        if parameter.dim() != 2:
            return 2 * parameter.numel() * _FLOAT32
        (short, long), size = sorted(parameter.shape), parameter.numel()
        projected = long * (min(_RANK, short) if decomposes else _RANK)
        casts = size if is_in_float32 and parameter.dtype in _HALVES else 0
        update = (copies * projected + 2 * size + casts) * (_FLOAT32 if is_in_float32 else parameter.itemsize)
        return max(update, (2 * size + short**2 + short) * _FLOAT32 if decomposes else 0)

    return lambda parameters, is_on_cuda: max(map(of, parameters), default=0)


_BLOCKWISE = "quantizes states blockwise to 8 bits; embeddings and tensors of fewer than 4,096 numbers keep float32"
_OF_LION = "updates by the sign of one moment: needs another learning rate"
_OF_RMSPROP = "no first moment"
_OF_FACTORS = "factors second moments of matrices into rows and columns"
_OF_SGD = "no moments: needs another learning rate"
_OF_ADEMAMIX = "a second, slower first moment"
_IN_PAGES = "states move to the host when the device's memory is short; the peak counts them on the device"
_KINDS = {
    "adamw_torch_fused": _Kind(_copies(2)),
    "adamw_torch": _Kind(_copies(2), _copying(loop=2, foreach=1)),
    "adafactor": _Kind(_factored, step=_adafactor_step, remarks=(_OF_FACTORS, _OF_RMSPROP)),
    "sgd": _Kind(_copies(0), remarks=(_OF_SGD,)),
    "adagrad": _Kind(_copies(1), _copying(loop=1, foreach=2), remarks=("second moments are sums that never decay",)),
    "rmsprop": _Kind(_copies(1), _copying(loop=1, foreach=1), remarks=(_OF_RMSPROP,)),
    "adamw_bnb_8bit": _Kind(_in_8_bits(2), of_embeddings=_in_32_bits(2), remarks=(_BLOCKWISE,)),
    "adamw_8bit": _Kind(_in_8_bits(2), of_embeddings=_in_32_bits(2), remarks=(_BLOCKWISE,)),
    "lion_8bit": _Kind(_in_8_bits(1), of_embeddings=_in_32_bits(1), remarks=(_BLOCKWISE, _OF_LION)),
    "lion_32bit": _Kind(_in_32_bits(1), remarks=(_OF_LION,)),
    "rmsprop_bnb": _Kind(_in_32_bits(1), remarks=(_OF_RMSPROP,)),
    "rmsprop_bnb_32bit": _Kind(_in_32_bits(1), remarks=(_OF_RMSPROP,)),
    "rmsprop_bnb_8bit": _Kind(_in_8_bits(1), of_embeddings=_in_32_bits(1), remarks=(_BLOCKWISE, _OF_RMSPROP)),
    "ademamix": _Kind(_of_ademamix(in_8_bits=False), remarks=(_OF_ADEMAMIX,)),
    "ademamix_8bit": _Kind(
        _of_ademamix(in_8_bits=True), of_embeddings=_of_ademamix(in_8_bits=False), remarks=(_BLOCKWISE, _OF_ADEMAMIX)
    ),
}
# bitsandbytes' paged optimizers: the driver pages larger states; sizes on the device are the same.
_PAGED = {
    f"paged_{name}": replace(kind, remarks=(*kind.remarks, _IN_PAGES))
    for name, kind in {
        "adamw_32bit": _Kind(_in_32_bits(2)),
        "adamw_8bit": _KINDS["adamw_8bit"],
        "ademamix_32bit": _KINDS["ademamix"],
        "ademamix_8bit": _KINDS["ademamix_8bit"],
        "lion_32bit": _KINDS["lion_32bit"],
        "lion_8bit": _KINDS["lion_8bit"],
    }.items()
}
_PROJECTS = f"projects gradients of linear layers to rank {_RANK}, with --optim_target_modules all-linear"
_DECOMPOSES = "the workspace of its singular value decomposition is not counted"
_AVERAGES = "averages weights in place of a schedule"
# Optimizers of other libraries: the time of their steps is unknown.
_OF_LIBRARIES = {
    "galore_adamw": _Kind(
        _copies(2),
        of_products=_galore(_copies(2)),
        step=_low_rank_step(3, decomposes=True),
        remarks=(_PROJECTS, _DECOMPOSES),
    ),
    "galore_adamw_8bit": _Kind(
        _in_8_bits(2),
        of_products=_galore(_in_8_bits(2)),
        step=_low_rank_step(3, decomposes=True),
        remarks=(_PROJECTS, _DECOMPOSES, _BLOCKWISE),
    ),
    "galore_adafactor": _Kind(
        _factored,
        of_products=_galore(_factored, is_in_float32=True),
        step=_low_rank_step(2, is_in_float32=True, decomposes=True),
        remarks=(_PROJECTS, _DECOMPOSES, _OF_FACTORS, _OF_RMSPROP),
    ),
    "apollo_adamw": _Kind(_copies(2), of_products=_apollo, step=_low_rank_step(3), remarks=(_PROJECTS,)),
    "schedule_free_adamw": _Kind(_copies(2), step=_bytes_of_all, remarks=(_AVERAGES,)),
    "schedule_free_radam": _Kind(_copies(2), step=_bytes_of_all, remarks=(_AVERAGES,)),
    "schedule_free_sgd": _Kind(_copies(1), remarks=(_OF_SGD, _AVERAGES)),
}
_ALL = {**_KINDS, **_PAGED, **_OF_LIBRARIES}

# Optimizer name of a class, and its options that each add a state of a parameter's size. Classes by name: importing
# transformers' takes seconds.
_CLASSES = {
    "torch.optim.adam.Adam": (DEFAULT, ("amsgrad",)),
    "torch.optim.adamw.AdamW": (DEFAULT, ("amsgrad",)),
    "torch.optim.sgd.SGD": ("sgd", ("momentum",)),
    "torch.optim.adagrad.Adagrad": ("adagrad", ()),
    "torch.optim.rmsprop.RMSprop": ("rmsprop", ("momentum", "centered")),
    "transformers.optimization.Adafactor": ("adafactor", ("beta1",)),
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": ("schedule_free_adamw", ()),
    "schedulefree.radam_schedulefree.RAdamScheduleFree": ("schedule_free_radam", ()),
    "schedulefree.sgd_schedulefree.SGDScheduleFree": ("schedule_free_sgd", ()),
}
# Optimizers that add the decay of weights to copies of their gradients, on top of other temporaries.
_DECAY_BY_COPIES = frozenset({"sgd", "rmsprop"})
# By the update rule of an optimizer of bitsandbytes, and the bits of its states.
_OF_BITSANDBYTES = {
    ("adam", 8): "adamw_8bit",
    ("adam", 32): "paged_adamw_32bit",
    ("lion", 8): "lion_8bit",
    ("lion", 32): "lion_32bit",
    ("rmsprop", 8): "rmsprop_bnb_8bit",
    ("rmsprop", 32): "rmsprop_bnb",
    ("ademamix", 8): "ademamix_8bit",
    ("ademamix", 32): "ademamix",
}


def planned_like(
    optimizer: "torch.optim.Optimizer | PlannedOptimizer | None", is_on_cuda: bool = False
) -> "PlannedOptimizer":
    """Returns the planned optimizer of the same class and options; AdamW for other classes, and for None.

    Args:
        optimizer: the real optimizer, which accelerate may have wrapped; a planned one is returned as it is.
    """
    if isinstance(optimizer, PlannedOptimizer):
        return optimizer
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    rule, bits, in_32_bits = bitsandbytes.optimizer_kind(inner)
    if rule:
        return PlannedOptimizer(_OF_BITSANDBYTES.get((rule, bits), DEFAULT), is_on_cuda, in_32_bits)
    name, adding = _CLASSES.get(f"{type(inner).__module__}.{type(inner).__qualname__}", (DEFAULT, ()))
    groups = getattr(inner, "param_groups", ())
    more = max((sum(bool(group.get(option)) for option in adding) for group in groups), default=0)
    decays = name in _DECAY_BY_COPIES and any(group.get("weight_decay") for group in groups)
    return PlannedOptimizer(name, is_on_cuda, more_states=more, decays=decays)


def state_tensors(optimizer: "torch.optim.Optimizer") -> Iterator[torch.Tensor]:
    """Yields the tensors of an optimizer's states, step counts included; accelerate's wrapper has them too."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return (value for value in values if isinstance(value, torch.Tensor))


def smaller_optimizers(is_on_cuda: bool) -> list[str]:
    """Returns the names of low-memory optimizers that work here; the first one is AdamW without temporaries."""
    in_8_bits = ["adamw_8bit"] if is_on_cuda and installed_version(("bitsandbytes",)) else []
    return [DEFAULT, *in_8_bits, "adafactor"]


def is_known(name: str) -> bool:
    """True if the sizes of an optimizer's states are known whatever its arguments; `check` rejects paged ones, which
    move to the host."""
    return name in _KINDS or name in _PAGED


def unknown() -> tuple[str, ...]:
    """Returns the names of Trainer's optimizers with unknown memory, such as layer-wise ones."""
    from transformers.training_args import OptimizerNames

    return tuple(each.value for each in OptimizerNames if each.value not in _ALL)


@dataclass(frozen=True)
class OptimizerMemory:
    """An optimizer's memory for the parameters of one model, in bytes.

    Attributes:
        name: Trainer's name.
        states: bytes of the states after the first step.
        temporaries: bytes of a step's temporary tensors.
        remarks: how its update differs from AdamW's in float32, and what is not exact.
    """

    name: str
    states: int
    temporaries: int
    remarks: tuple[str, ...] = ()


def check(name: str) -> None:
    """Raise a MemOptError if an optimizer's memory cannot be predicted."""
    if name in _KINDS:
        return
    supported = f"supported are {', '.join(_KINDS)}"
    if name.startswith("paged_"):
        raise MemOptError(
            f"--optim {excerpt(name)}: its states move between host and device as the driver pages them, which cannot "
            f"be predicted; {supported}"
        )
    if name in _OF_LIBRARIES:
        raise MemOptError(
            f"--optim {name}: the time of its step is unknown, advise --optim all shows its memory; {supported}"
        )
    near = difflib.get_close_matches(name, _KINDS, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}? " if near else "its memory is unknown; "
    # The message lists many names, so the quotation is shorter.
    raise MemOptError(f"--optim {excerpt(name, longest=QUOTED // 2) or repr(name)}: {hint}{supported}")


@dataclass(frozen=True)
class PlannedOptimizer:
    """An optimizer that does not exist yet.

    Attributes:
        name: Trainer's name; `check` accepts it.
        embeddings: ids of the parameters whose states bitsandbytes keeps in float32, as Trainer configures it.
        products: ids of the weights whose gradients GaLore and APOLLO project.
        more_states: states of each parameter's size that options add, such as momentum.
        decays: weight decay is added to copies of the gradients.
    """

    name: str = DEFAULT
    is_on_cuda: bool = False
    embeddings: frozenset[int] = field(default=frozenset(), repr=False)
    products: frozenset[int] = field(default=frozenset(), repr=False)
    more_states: int = 0
    decays: bool = False

    @classmethod
    def of_model(cls, model: torch.nn.Module, name: str = DEFAULT, is_on_cuda: bool = False) -> "PlannedOptimizer":
        """Returns the optimizer that a Trainer makes for a model."""
        embeddings, products = (
            frozenset(id(module.weight) for module in model.modules() if isinstance(module, kind))
            for kind in (torch.nn.Embedding, torch.nn.Linear)
        )
        return cls(name, is_on_cuda, embeddings, products)

    def __str__(self) -> str:
        return "AdamW" if self.name == DEFAULT else self.name

    def state_sizes(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Returns the bytes of each state of these parameters, after the first step."""
        kind = _ALL[self.name]

        def states(parameter: torch.Tensor) -> list[int]:
            if kind.of_embeddings is not None and id(parameter) in self.embeddings:
                return kind.of_embeddings(parameter)
            if kind.of_products is not None and id(parameter) in self.products:
                return kind.of_products(parameter)
            return [*kind.states(parameter), *[parameter.nbytes] * self.more_states]

        return list(itertools.chain.from_iterable(map(states, parameters)))

    def compared(self, parameters: Sequence[torch.Tensor]) -> tuple[OptimizerMemory, ...]:
        """Returns the memory of all known optimizers for these parameters, this one first."""
        every = (self, *(replace(self, name=name) for name in _ALL if name != self.name))
        return tuple(
            OptimizerMemory(
                each.name, sum(each.state_sizes(parameters)), each.step_bytes(parameters), _ALL[each.name].remarks
            )
            for each in every
        )

    def moved(self, parameters: Sequence[torch.Tensor]) -> int:
        """Returns the bytes that gradient clipping and the kernels of a step read and write on CUDA.

        A fused kernel reads and writes a parameter and its states, and reads the gradient. AdamW with foreach (2.13,
        `_multi_tensor_adamw`) takes ten kernels, which together move 21 times the parameter's bytes.
        """
        size = sum(parameter.nbytes for parameter in parameters)
        fused = 3 * size + 2 * sum(self.state_sizes(parameters))
        return _CLIPPING * size + (21 * size if self.name == "adamw_torch" else fused)

    def step_bytes(self, parameters: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of a step's temporary tensors.

        Counts tensors of two or more dimensions only, if there are any: Trainer puts biases and norms into a group of
        their own, which is stepped separately.
        """
        group = [parameter for parameter in parameters if parameter.dim() > 1] or list(parameters)
        decay = _copying(loop=1, foreach=1)(group, self.is_on_cuda) if self.decays else 0
        return _ALL[self.name].step(group, self.is_on_cuda) + decay


# A real optimizer, or a planned one.
Optimizer = torch.optim.Optimizer | PlannedOptimizer
