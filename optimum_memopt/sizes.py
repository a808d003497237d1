"""Parses amounts of memory as users write them: `24GiB`, `800MiB`, `24GB`, `90%`, `auto`. Pure."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from optimum_memopt.errors import MemOptError, excerpt

MIB = 2**20
AUTO = "auto"
# A lower-case b means bytes too: accelerate's `convert_file_size_to_int` takes 24gb for 24 gigabits.
_UNITS = {
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(-?\d{1,20}(?:\.\d{1,20})?)\s*(%|[a-z]*)", re.ASCII | re.IGNORECASE)
# An exbibyte, more than any device has.
LARGEST = 2**60
_ALLOWED = (
    "allowed: sizes such as 24GiB, 800MiB or 24GB (1000-based), shares of the device's memory such as 90%, and auto"
)


@dataclass(frozen=True)
class Budget:
    """The limit for the peak of a training step.

    Attributes:
        text: the budget as the user wrote it.
        bytes: the limit in bytes; None if it depends on the device.
        share: the share of the device's memory; None for a size and for `auto`.
    """

    text: str
    bytes: int | None = None
    share: Fraction | None = None

    def on_device(self, total: int, available: int) -> int:
        """Returns the budget in bytes, on a device with `total` bytes for this process, `available` for `auto`."""
        if self.bytes is not None:
            return self.bytes
        return available if self.share is None else int(self.share * total)


def parse_budget(text: str) -> Budget:
    """Parse a budget.

    Raises:
        MemOptError: it is malformed; one line that says what is allowed, and that a bare number lacks a unit.
    """
    if text.lower() == AUTO:
        return Budget(AUTO)
    why = _ALLOWED
    if match := _SIZE.fullmatch(text.strip()):
        number, unit = Fraction(match[1]), match[2].lower()
        if unit == "%":
            if 0 < number <= 100:
                return Budget(text, share=number / 100)
            why = "a share is more than 0% and at most 100%"
        elif unit in _UNITS:
            if 0 < int(number * _UNITS[unit]) <= LARGEST:
                return Budget(text, int(number * _UNITS[unit]))
            why = f"a size is at least one byte and at most {LARGEST // 2**40} TiB"
        elif not unit:
            shown = match[1] if 0 < number <= 100 else 24
            why = f"a number needs a unit, such as {shown}GiB or {shown}%"
    raise MemOptError(f"--memory_opt_budget {excerpt(text).strip() or repr(text)}: {why}")


def gib_text(size: int) -> str:
    """Returns a size in bytes as text: `24.00 GiB`, `812.5 MiB`."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.1f} MiB"


def text_of_at_least(size: int) -> str:
    """Returns a size in bytes as text, rounded up: for a size that may be given as a budget."""
    step = Fraction(2**30, 100) if size >= 2**30 else Fraction(2**20, 10)
    return gib_text(math.ceil(math.ceil(size / step) * step))
