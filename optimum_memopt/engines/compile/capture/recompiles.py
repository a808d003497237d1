"""Why a model is recompiled, read from the guards that torch says failed. Pure."""

import re
from collections import Counter
from collections.abc import Sequence

from optimum_memopt.errors import MemOptError

_COMPILE_ID = re.compile(r"^\d+/\d+: ")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)\b")
# `self.calls == 3`, `self._modules['head'].scale == 0.5`, `alpha == 1.0`: torch compares Python numbers so.
_CHANGED_NUMBER = re.compile(rf"^(?P<name>[\w.\[\]'\"]+) == {_NUMBER.pattern}$")
# The model's name where a wrapper that takes `*args` is traced (`decide.with_detached_outputs`).
_MODEL = re.compile(r"\bargs\[0\](?=\.)")
_QUOTED = 3


class TooManyRecompilesError(MemOptError):
    """torch's limit of recompiles is reached."""


class Recompiles:
    """The forwards that recompiled after a model's first, and the guards that failed.

    Guards that differ only in their numbers have one cause: batches of many sizes, or a number of the model that
    changes at every step.
    """

    def __init__(self) -> None:
        self._count = 0
        self._guards: dict[str, None] = {}
        self._causes: Counter[str] = Counter()

    def add(self, reasons: Sequence[str], limit: int, model: str) -> list[str]:
        """Note the reasons that torch gives for a forward's recompile, none where there was none.

        Returns:
            Lines to log.

        Raises:
            TooManyRecompilesError: as many forwards as the limit have recompiled.
        """
        lines = [line for reason in reasons if (line := self.note(reason))]
        self._count += bool(reasons)
        if reasons and self._count >= limit:
            raise TooManyRecompilesError(
                f"{model} was recompiled {limit} times, which is the limit; last failed guards: {self.last}; "
                f"{self.advice}, or raise torch._dynamo.config.recompile_limit"
            )
        return lines

    def note(self, reason: str) -> str:
        """Note a failed guard, as torch's recompile reason has it.

        Returns:
            The line to log: for the first guard of a cause, and once more when a number changed again; else "".
        """
        guard = _MODEL.sub("self", _COMPILE_ID.sub("", reason))
        if guard in self._guards:
            return ""
        self._guards[guard] = None
        cause = _NUMBER.sub("N", guard)
        self._causes[cause] += 1
        if self._causes[cause] == 1:
            return f"recompiled the training graph; failed guard: {guard}"
        if self._causes[cause] == 2 and (name := _changed_number(guard)):
            return f"the training graph is recompiled for each value of {name}: {_as_tensor(name)}"
        return ""

    @property
    def last(self) -> str:
        return "; ".join(list(self._guards)[-_QUOTED:])

    @property
    def advice(self) -> str:
        """A way for the user to have fewer recompiles."""
        changed = dict.fromkeys(
            name
            for guard in self._guards
            if (name := _changed_number(guard)) and self._causes[_NUMBER.sub("N", guard)] > 1
        )
        if changed:
            return "; ".join(map(_as_tensor, list(changed)[-_QUOTED:]))
        return "pad batches to fewer lengths (pad_to_multiple_of)"


def _changed_number(guard: str) -> str:
    match = _CHANGED_NUMBER.match(guard)
    return match["name"] if match else ""


def _as_tensor(name: str) -> str:
    """Advice that keeps a number from being a constant of the graph."""
    if not name.startswith("self."):
        return f"pass {name} as a tensor (torch.tensor({name})), whose value torch does not guard on"
    attribute = name.rpartition(".")[2]
    return (
        f"make {name} a tensor, whose value torch does not guard on: register_buffer({attribute!r}, torch.tensor(…), "
        f"persistent=False), changed in place (.fill_, .add_)"
    )
