"""What is installed, and a warning of it that says nothing here."""

import contextlib
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator, Sequence


def installed_version(distributions: Sequence[str]) -> tuple[str, str] | None:
    """Name and version of the first of these distributions that is installed, without an import of it."""
    for distribution in distributions:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@contextlib.contextmanager
def without_kernel_warning() -> Iterator[None]:
    """Without the warning of bitsandbytes, which PEFT and Trainer import, about a kernel for CPUs that it did not load
    (0.50): what is predicted runs none.

    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/backends/cpu/ops.py
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def passes(record: logging.LogRecord) -> bool:
        return "gemm_4bit_forward" not in record.msg

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def software() -> dict[str, str]:
    """The versions of this package, torch and transformers, by their distributions."""
    versions = (installed_version((distribution,)) for distribution in ("optimum-memopt", "torch", "transformers"))
    return dict(filter(None, versions))
