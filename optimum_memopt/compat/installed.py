"""Finds installed package versions, and silences an irrelevant warning of bitsandbytes."""

import contextlib
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator, Sequence


def installed_version(distributions: Sequence[str]) -> tuple[str, str] | None:
    """Returns name and version of the first of these distributions that is installed, without importing it."""
    for distribution in distributions:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@contextlib.contextmanager
def without_kernel_warning() -> Iterator[None]:
    """Suppress the warning of bitsandbytes (0.50), which PEFT and Trainer import, about a CPU kernel that it did not
    load: predictions do not run it.

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
    """Returns the versions of this package, torch and transformers, by distribution."""
    versions = (installed_version((distribution,)) for distribution in ("optimum-memopt", "torch", "transformers"))
    return dict(filter(None, versions))
