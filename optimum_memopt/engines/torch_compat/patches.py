"""Patches of code of other packages, and the private names that each needs.

Private names change between releases. A patch declares the names that it needs and what is lost without it. If it
cannot apply to a release, this causes a warning when the engine attaches, a line of `optimum-cli memopt env` and one
of the plan table's header; under FSDP2 and ZeRO 3, whose patches are required, it is an error (`releases.py`).
"""

import contextlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from optimum_memopt.compat.installed import installed_version
from optimum_memopt.generators import preserved_generators

_MISSING = object()


@dataclass(frozen=True)
class Name:
    """A name in a module of another package.

    Attributes:
        module: the module's dotted path, `transformers.masking_utils`.
        name: the dotted name in it.
        parameters: the names of the function's first parameters; an empty string matches any.
        mentions: strings that its source must contain, such as attributes that a class sets.
        instead: the name that an earlier release has in its place.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    instead: str = ""

    def problem(self) -> str:
        """Returns what is missing, in words; empty if nothing is."""
        place = f"{self.module}.{self.name}"
        found = self._find(self.name)
        if found is _MISSING:
            is_earlier = self.instead and self._find(self.instead) is not _MISSING
            return "" if is_earlier else f"no {place}"
        if self.parameters and not _takes(found, self.parameters):
            return f"{place} without the parameters {', '.join(self.parameters)}"
        source = _source_of(found) if self.mentions else ""
        lacking = [name for name in self.mentions if name not in source]
        return f"{place} without {', '.join(lacking)}" if lacking else ""

    def _find(self, name: str) -> Any:
        # TRL imports rich, which draws from Python's random (15.0).
        draws = contextlib.nullcontext() if self.module in sys.modules else preserved_generators()
        try:
            # DeepSpeed logs to the current stdout while it is imported.
            with contextlib.redirect_stdout(sys.stderr), draws:
                return pkgutil.resolve_name(f"{self.module}:{name}")
        except (ImportError, AttributeError):
            return _MISSING


def _source_of(found: Any) -> str:
    try:
        return inspect.getsource(found)
    except (TypeError, OSError):
        return ""


def _takes(function: Any, parameters: Sequence[str]) -> bool:
    try:
        known = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    pairs = zip(parameters, known, strict=False)
    return len(known) >= len(parameters) and all(wanted in ("", found) for wanted, found in pairs)


@dataclass(frozen=True)
class Patch:
    """A patch of another package's code.

    Attributes:
        subject: the subject of the patch, for reports.
        loss: the consequence if the patch cannot apply.
        package: the package that it patches.
        since: the first release with the patched code; earlier ones have nothing to patch.
        tested: the releases that it was tested with.
        names: the private names that it needs.
    """

    subject: str
    loss: str
    package: str
    since: str
    tested: str
    names: tuple[Name, ...]

    def problem(self) -> str:
        """Returns why the patch cannot apply, in one line; empty if it can, or if there is nothing to patch."""
        version = self._version
        problem = next(filter(None, (name.problem() for name in self.names)), "") if version else ""
        if not problem:
            return ""
        return f"{self.loss}: {self.package} {version} has {problem}; tested with {self.package} {self.tested}"

    @property
    def _version(self) -> str:
        """Returns the installed release; empty if there is none, or it is too early to have the code."""
        installed = installed_version([self.package])
        return "" if installed is None or Version(installed[1]) < Version(self.since) else installed[1]

    @property
    def is_in_use(self) -> bool:
        """True if its package is imported."""
        return self.package in sys.modules

    @property
    def applies(self) -> bool:
        """True if the package is imported, has the code, and all names match."""
        return self.is_in_use and bool(self._version) and not self.problem()
