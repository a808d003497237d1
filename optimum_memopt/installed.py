"""Versions of installed distributions, found without importing them."""

import importlib.metadata
from collections.abc import Sequence


def installed_version(distributions: Sequence[str]) -> tuple[str, str] | None:
    """Name and version of the first of these distributions that is installed."""
    for distribution in distributions:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
