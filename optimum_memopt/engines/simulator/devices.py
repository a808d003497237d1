"""Rates of devices, for costs that are estimated instead of measured.

Dense rates, without sparsity, from the vendors' data sheets:

- H100 SXM, H200 SXM: resources.nvidia.com/en-us-tensor-core (H100 and H200 data sheets)
- A100 80GB SXM: nvidia.com, NVIDIA A100 Tensor Core GPU data sheet (2021)
- L40S, L4, T4, A10, V100 SXM2, RTX A6000, RTX 6000 Ada: nvidia.com, data sheets of these products; sparse rates are
  halved
- RTX 4090: NVIDIA Ada GPU architecture white paper, appendix A (bf16 with fp32 accumulation)
- RTX 3090: NVIDIA Ampere GA102 white paper, appendix A (bf16 with fp32 accumulation)
- MI300X: amd.com, AMD Instinct MI300X data sheet

The link is one direction of PCIe x16 (generations 3, 4 and 5: 16, 32 and 64 GB/s); the link between devices, if any,
is half of the data sheets' rate of NVLink and Infinity Fabric.

The fractions of these rates that kernels attain are fitted to published times, one set per generation (docs/gpu.md).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimum_memopt.engines.simulator.work import Kernel
from optimum_memopt.engines.torch_compat.kernels import Multiprocessors
from optimum_memopt.errors import MemOptError, excerpt, path_excerpt
from optimum_memopt.plans.plan_file import read_json

_GIB = 2**30
_DTYPES = ("float32", "bfloat16", "float16")
_SHAPE = (
    "needed are name, memory (bytes), bandwidth and link (bytes a second), flops (a second, by dtype, float32 among "
    "them); for CUDA also cuda (capability as 8.6, multiprocessors, threads of each)"
)
_LARGEST_FILE = 2**20
# Limits of valid numbers: a megabyte, or as much a second, up to what a rack of devices has.
_LEAST, _MOST = 1e6, 1e18
_LONGEST_NAME = 80
# Most multiprocessors, and most threads of one.
_MOST_PARTS = 2**16


@dataclass(frozen=True)
class Attained:
    """The fractions of a data sheet's rates that PyTorch's kernels attain.

    Attributes:
        bandwidth: fraction of the memory bandwidth, in kernels that move operands.
        flops: fraction of the rate of matrix products.
        unaligned: fraction of `flops` that half-precision products reach if their rows are not 16-byte aligned.
        call: host seconds per operator call from a module, on the machine of the published times.
    """

    bandwidth: float
    flops: float
    unaligned: float = 0.33
    call: float = 22e-6

    def share(self, kernel: Kernel) -> float:
        """Returns the fraction of the attained rate that a kind of kernel reaches: of `flops` for products and
        attention, otherwise of `bandwidth`."""
        return self.unaligned if kernel is Kernel.UNALIGNED else _SHARES.get(kernel, 1.0)


# Fractions measured on an H100 with a profiler.
_SHARES = {Kernel.FUSED: 0.75, Kernel.CONVERTING: 0.7, Kernel.REDUCING: 0.55, Kernel.ATTENTION: 0.33}
# H100: steps of plain PyTorch, and Liger Kernel's benchmarks of PyTorch, as for A100. L40S: PEFT's method comparison.
# GeForce: Liger Kernel's on an RTX 4090. Hopper's full rate needs special instructions, which unaligned products do
# not use.
_HOPPER, _AMPERE = Attained(0.9, 0.74, unaligned=0.17, call=36e-6), Attained(0.75, 0.85)
_ADA, _GEFORCE = Attained(0.9, 0.75), Attained(0.85, 1.0)


@dataclass(frozen=True)
class Device:
    """A device's rates.

    Attributes:
        memory: memory in bytes.
        bandwidth: memory bandwidth, bytes a second.
        flops: floating point operations of matrix products a second, by dtype such as `bfloat16`.
        link: rate of the link to the host, bytes a second in one direction.
        attained: fractions of the rates that kernels attain; those of the L40S for devices without published times.
        peers: rate to other devices of the machine, bytes a second in one direction; 0: through `link`.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    link: float
    cuda: Multiprocessors | None = None
    capability: tuple[int, int] = (0, 0)
    attained: Attained = _ADA
    peers: float = 0.0

    @property
    def lacks(self) -> tuple[str, ...]:
        """Returns the half-precision dtypes that the device does not compute in."""
        return tuple(dtype for dtype in _DTYPES if dtype not in self.flops)

    @property
    def kind(self) -> torch.device:
        """Returns torch's device type; a CPU if it is not a CUDA device."""
        return torch.device("cpu" if self.cuda is None else "cuda")

    @property
    def memory_rate(self) -> float:
        """Returns the bytes a second that kernels read and write."""
        return self.attained.bandwidth * self.bandwidth

    @property
    def libraries(self) -> int:
        """Returns the bytes that cuBLAS holds: one workspace for the forward's thread and one for autograd's
        (`aten/src/ATen/cuda/CUDABlas.cpp`, 2.13)."""
        if self.cuda is None:
            return 0
        return 2 * (32 * 2**20 if self.capability >= (9, 0) else 2 * 2**22 + 2**17)

    @property
    def copy_rate(self) -> float:
        """Returns the bytes a second of the link that copies from and to pinned memory attain; not tuned."""
        return 0.8 * self.link

    @property
    def gather_rate(self) -> float:
        """Returns the bytes a second that an all-gather gets from other devices; not tuned."""
        return 0.8 * (self.peers or self.link)

    def product_rate(self, dtype: str) -> float:
        """Returns the floating point operations a second of matrix products; for a dtype that the device lacks, those
        of float32."""
        return self.attained.flops * self.flops.get(dtype, self.flops["float32"])


def _device(
    name: str,
    gib: int,
    gb_a_second: float,
    fp32: float,
    bf16: float | None,
    fp16: float,
    link: float,
    multiprocessors: tuple[int, int] | None = None,
    capability: tuple[int, int] = (0, 0),
    attained: Attained = _ADA,
    peers: float = 0.0,
) -> Device:
    listed = zip(_DTYPES, (fp32, bf16, fp16), strict=True)
    rates = {dtype: rate * 1e12 for dtype, rate in listed if rate is not None}
    cuda = None if multiprocessors is None else Multiprocessors(*multiprocessors)
    return Device(name, gib * _GIB, gb_a_second * 1e9, rates, link * 1e9, cuda, capability, attained, peers * 1e9)


DEVICES = {
    device.name: device
    for device in (
        _device("H100", 80, 3350, 67, 989, 989, 64, (132, 2048), (9, 0), _HOPPER, peers=450),
        _device("H200", 141, 4800, 67, 989, 989, 64, (132, 2048), (9, 0), _HOPPER, peers=450),
        _device("A100", 80, 2039, 19.5, 312, 312, 32, (108, 2048), (8, 0), _AMPERE, peers=300),
        _device("L40S", 48, 864, 91.6, 362, 362, 32, (142, 1536), (8, 9)),
        _device("L4", 24, 300, 30.3, 121, 121, 32, (58, 1536), (8, 9)),
        _device("A10", 24, 600, 31.2, 125, 125, 32, (72, 1536), (8, 6)),
        _device("RTX A6000", 48, 768, 38.7, 154.8, 154.8, 32, (84, 1536), (8, 6)),
        _device("RTX 6000 Ada", 48, 960, 91.1, 364.2, 364.2, 32, (142, 1536), (8, 9)),
        _device("RTX 4090", 24, 1008, 82.6, 165.2, 165.2, 32, (128, 1536), (8, 9), _GEFORCE),
        _device("RTX 3090", 24, 936, 35.6, 71, 71, 32, (82, 1536), (8, 6), _GEFORCE),
        # Turing and Volta have no bfloat16: torch computes it in float32.
        _device("T4", 16, 320, 8.1, None, 65, 16, (40, 1024), (7, 5)),
        _device("V100", 32, 900, 15.7, None, 125, 16, (80, 2048), (7, 0), peers=150),
        _device("MI300X", 192, 5300, 163.4, 1307, 1307, 64, peers=448),
    )
}

# The device whose rates are used for a GPU that is not in the table.
_UNKNOWN = "A100"


def device_at(device: torch.device) -> Device:
    """Returns the table's entry for a device of this machine, or `_UNKNOWN`."""
    name = torch.cuda.get_device_name(device)
    # `L4` is not in `L40`, nor `A100` in `RTX A1000`.
    matching = [each for each in DEVICES if re.search(rf"\b{each.replace(' ', ' ?')}(?![0-9])", name, re.IGNORECASE)]
    return DEVICES[max(matching, key=len, default=_UNKNOWN)]


def device_of(name: str) -> Device:
    """Returns a device of the table, or of a JSON file with the fields of `Device`.

    Raises:
        MemOptError: the name is neither a known device nor a readable file.
    """
    for listed, device in DEVICES.items():
        if listed.replace(" ", "").lower() == name.replace(" ", "").replace("-", "").lower():
            return device
    if not name.endswith(".json"):
        raise MemOptError(f"device {excerpt(name)}: allowed: {', '.join(DEVICES)}, and a JSON file")
    entry = read_json(Path(name), "device", _SHAPE, _LARGEST_FILE)
    if not isinstance(entry, dict):
        raise MemOptError(f"device file {path_excerpt(name)}: {_SHAPE}")
    try:
        rates = {dtype: _number(f"flops of {excerpt(dtype)}", rate) for dtype, rate in entry["flops"].items()}
        if "float32" not in rates:
            raise ValueError("flops has no float32")
        return Device(
            _text("name", entry["name"]),
            int(_number("memory", entry["memory"])),
            _number("bandwidth", entry["bandwidth"]),
            rates,
            _number("link", entry["link"]),
            *_cuda(entry.get("cuda")),
        )
    except KeyError as error:
        raise MemOptError(f"device file {path_excerpt(name)}: there is no {error}; {_SHAPE}") from None
    except (ValueError, AttributeError) as error:
        raise MemOptError(f"device file {path_excerpt(name)}: {excerpt(str(error))}; {_SHAPE}") from None


def _cuda(entry: Any) -> tuple[Multiprocessors | None, tuple[int, int]]:
    """Parses the multiprocessors and compute capability of a CUDA device; an entry of None is another device."""
    if entry is None:
        return None, (0, 0)
    if not isinstance(entry, dict):
        raise ValueError(f"cuda is {excerpt(entry) or repr(entry)}, not an object")
    major, point, minor = str(entry["capability"]).partition(".")
    if not (point and major.isdecimal() and minor.isdecimal() and len(major) < 3 and len(minor) < 3):
        raise ValueError(f"cuda.capability is {excerpt(entry['capability'])}, not a number as 8.6")
    count, threads = (entry[name] for name in ("multiprocessors", "threads"))
    for name, number in (("multiprocessors", count), ("threads", threads)):
        if type(number) is not int or not 1 <= number <= _MOST_PARTS:
            raise ValueError(f"cuda.{name} is {excerpt(number) or repr(number)}, not a whole number from 1 on")
    return Multiprocessors(count, threads), (int(major), int(minor))


def _number(name: str, given: Any) -> float:
    # Exact types, since Python's True is an int; comparisons with NaN are false.
    if type(given) not in (int, float) or not _LEAST <= given <= _MOST:
        raise ValueError(f"{name} is {excerpt(given) or repr(given)}, not a number from {_LEAST:.0e} to {_MOST:.0e}")
    return float(given)


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str) or not given.isprintable() or not 0 < len(given) <= _LONGEST_NAME:
        raise ValueError(f"{name} is {excerpt(given) or repr(given)}, not a text of 1 to {_LONGEST_NAME} letters")
    return given
