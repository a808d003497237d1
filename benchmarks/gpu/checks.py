"""A check of gpu/acceptance.py, and the process that runs some of them one after the other."""

import gc
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
# Begins each line of the process that is for the one that started it.
MARK = "@gpu "
# Exit status of a process whose device computes nothing any more: an illegal access, an assertion in a kernel.
DEVICE_IS_LOST = 3


@dataclass(frozen=True)
class Setting:
    """How the checks run.

    Attributes:
        quick: tiny models and few rounds, without cuDNN and NCCL: does it run?
        layers: of the large models of the part `worth`.
    """

    quick: bool = False
    layers: int = 6

    def compiler(self, model: str) -> str:
        """inductor, which takes minutes for each model on a machine with few cores: of --quick for one of them."""
        return "aot_eager" if self.quick and model != "roberta" else "inductor"


@dataclass(frozen=True)
class Figure:
    """One thing that was found.

    Attributes:
        name: what it is, below the name of its check.
        is_right: within its limit.
        figure: as it is shown.
        limit: as it is shown; empty where there is none.
        data: the numbers behind it.
    """

    name: str
    is_right: bool
    figure: str
    limit: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A figure, or what kept a check from having one.

    Attributes:
        check: its name.
        status: `PASS`, `FAIL` or `SKIP`.
        name: see `Figure`.
        figure: see `Figure`; the error's line, or why it was left out.
        limit: see `Figure`.
        crashed: there is no figure, since the check ended in an error.
        data: see `Figure`.
    """

    check: str
    status: str
    name: str
    figure: str
    limit: str = ""
    crashed: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        name = f"{self.check}: {self.name}" if self.name else self.check
        return f"{self.status} {name:<60} {self.figure:<24} {self.limit}".rstrip()


@dataclass(frozen=True)
class Check:
    """Something to find out.

    Attributes:
        name: in the report, and for `--only`.
        run: yields what it finds.
        seconds: it may take.
        needs: modules beyond torch, transformers and accelerate.
    """

    name: str
    run: Callable[[Setting], Iterator[Figure]]
    seconds: int = 120
    needs: tuple[str, ...] = ()

    def missing(self) -> str:
        """Why it cannot run here; empty where it can."""
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(lacking)} not installed" if lacking else ""

    def outcomes(self, setting: Setting) -> Iterator[Outcome]:
        """Run it; an error is an outcome."""
        if why := self.missing():
            yield Outcome(self.name, SKIP, "", why)
            return
        try:
            for found in self.run(setting):
                status = PASS if found.is_right else FAIL
                yield Outcome(self.name, status, found.name, found.figure, found.limit, data=found.data)
        except Exception as error:
            traceback.print_exc()
            yield crash(self.name, error_line(error))


def crash(name: str, why: str) -> Outcome:
    """The outcome of a check that ended in an error."""
    return Outcome(name, FAIL, "", why, crashed=True)


def error_line(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:200]


def within(name: str, value: float, limit: float, text: str = "{:.2e}", **data: Any) -> Figure:
    """A figure that must not pass its limit; NaN passes none."""
    return Figure(name, value <= limit, text.format(value), text.format(limit), {"value": value, **data})


def serve(checks: Sequence[Check], setting: Setting, conditions: str) -> int:
    """Run checks in this process, and print a line for the beginning, each outcome and the end of each.

    Args:
        checks: in this order.
        setting: of all.
        conditions: told first.

    Returns:
        The exit status: the process is of no further use where it is not 0.
    """
    _tell({"conditions": conditions})
    for check in checks:
        _tell({"begin": check.name})
        begin = time.perf_counter()
        for outcome in check.outcomes(setting):
            _tell({"outcome": asdict(outcome)})
        try:
            clean_up()
        except Exception as error:
            _tell({"outcome": asdict(crash(check.name, f"the device is lost: {error_line(error)}"))})
            _tell({"end": check.name, "seconds": time.perf_counter() - begin})
            return DEVICE_IS_LOST
        _tell({"end": check.name, "seconds": time.perf_counter() - begin})
    return 0


def clean_up() -> None:
    """Forget all that a check has compiled and allocated.

    Raises:
        RuntimeError: the device computes nothing any more.
    """
    import torch

    torch.cuda.synchronize()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


def _tell(event: Mapping[str, Any]) -> None:
    print(MARK + json.dumps(event), flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """The event that `serve` told in a line, None where it is somebody else's."""
    if not line.startswith(MARK):
        print(line, end="", file=sys.stderr)
        return None
    event: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return event
