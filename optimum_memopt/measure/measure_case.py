"""One measurement: a few training steps of one case in a process of its own; peak and time as JSON.

    python -m optimum_memopt.measure.measure_case < case.json

A step is forward and backward; an optimizer's states come on top, the same for every case. The first step compiles
the model and is not measured.
"""

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.predict.workload import Workload

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

_REMARK = "[memopt] "


@dataclass(frozen=True)
class Case:
    """A case that one process trains.

    Attributes:
        options: fields of `MemOptOptions`; None trains with plain PyTorch.
        steps: measured steps after the first.
        bf16: forwards run under autocast to bfloat16, as with Trainer's `--bf16`.
        optimizer: each step ends with one of a fused AdamW, Trainer's default.
    """

    workload: Workload
    options: Mapping[str, Any] | None = field(default_factory=dict)
    steps: int = 2
    bf16: bool = False
    optimizer: bool = False

    def prepare(self, model: Any) -> None:
        """Change the model, on its device, before an engine is attached; a hook for baselines."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Self":
        data = json.loads(text)
        workload = data["workload"]
        workload["trainable"] = tuple(workload["trainable"])
        return cls(**{**data, "workload": Workload(**workload)})


@dataclass(frozen=True)
class Measurement:
    """Memory and time of a case.

    Attributes:
        peak_mib: peak memory of the measured steps: resident on the CPU; on CUDA allocated by torch, plus what an
            engine with an allocator of its own took.
        held_mib: of that, what is held between steps: weights, the optimizer's states, libraries.
        step_seconds: wall time of a step, median.
        cpu_seconds: CPU time of a step, median; on a busy machine it varies less than wall time.
        method: `exact`, or `sampled` where the system cannot reset the high-water mark of resident memory.
        table: the engine's plan table, None for plain PyTorch.
        remarks: what the package logged.
    """

    peak_mib: float
    step_seconds: float
    cpu_seconds: float
    method: str = "exact"
    table: PlanTable | None = None
    remarks: tuple[str, ...] = ()
    held_mib: float = 0.0

    @property
    def activations_mib(self) -> float:
        """The peak over what is held between steps: activations, gradients and workspaces."""
        return self.peak_mib - self.held_mib

    @property
    def engine_table(self) -> PlanTable:
        """The table; raises MemOptError where plain PyTorch trained the case."""
        if self.table is None:
            raise MemOptError("a case without an engine has no plan table")
        return self.table

    @property
    def claimed_bytes(self) -> int:
        return self.table.claimed_saving_bytes if self.table else 0

    @property
    def applied(self) -> frozenset[str]:
        """The `cluster_id:strategy:-1` that the engine reports as applied."""
        enabled = self.table.enabled if self.table else ()
        return frozenset(part for plan in enabled for part in plan.config.split(","))

    def to_json(self) -> str:
        return json.dumps({**vars(self), "table": self.table and self.table.to_json()})

    @classmethod
    def from_json(cls, text: str) -> "Measurement":
        data = json.loads(text)
        table = data["table"] and PlanTable.from_json(data["table"])
        return cls(**{**data, "table": table, "remarks": tuple(data["remarks"])})


def measure(case: Case) -> Measurement:
    """Run the case in this process, which should be fresh. Raises MemOptError where the engine cannot train it."""
    import torch

    from optimum_memopt.engines.api.run import AUTO
    from optimum_memopt.engines.shared.registry import factory
    from optimum_memopt.loop import optimize
    from optimum_memopt.memory import malloc
    from optimum_memopt.memory.peak_monitor import PeakMonitor

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = case.workload.build()
    model.to(device)
    # The context and the libraries that are loaded by now are no engine's.
    occupied = _outside_torch_mib(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    case.prepare(model)
    engine = None
    if case.options is not None:
        name = case.options.get("memory_opt_engine", AUTO)
        own = {} if name == AUTO else factory(name).options_to_measure
        engine = optimize(model, **{"memory_opt_log_level": "warning", **own, **case.options})
    if engine is None:
        # As engines set it up.
        malloc.return_freed_memory()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if case.optimizer else None
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.bf16)
    _step(model, batch, autocast, optimizer)
    monitor = PeakMonitor(device)
    monitor.start_run()
    # Nothing has run since, so the peak so far is what is held.
    held = monitor.run_peak
    times = [_step(model, batch, autocast, optimizer) for _ in range(case.steps)]
    allocates = engine is not None and factory(engine.name).allocates_outside_torch
    own_memory = max(0.0, _outside_torch_mib(device) - occupied) if allocates else 0.0
    return Measurement(
        peak_mib=monitor.run_peak + own_memory,
        step_seconds=statistics.median(wall for wall, _ in times),
        cpu_seconds=statistics.median(cpu for _, cpu in times),
        method=monitor.method,
        table=engine.plans() if engine else None,
        held_mib=held,
    )


def _step(
    model: "torch.nn.Module",
    batch: Mapping[str, "torch.Tensor"],
    autocast: contextlib.AbstractContextManager,
    optimizer: "torch.optim.Optimizer | None",
) -> tuple[float, float]:
    """Wall and CPU seconds of forward, backward and the optimizer's step."""
    wall, cpu = time.perf_counter(), time.process_time()
    with autocast:
        loss = model(**batch).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    loss.item()
    model.zero_grad()
    return time.perf_counter() - wall, time.process_time() - cpu


def _outside_torch_mib(device: "torch.device") -> float:
    """GPU memory in use that is not torch's allocator's: of this process and of others. ONNX Runtime has an arena that
    never shrinks: what it holds at the end is its peak."""
    import torch

    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**20


def spawn(case: Case, program: Sequence[str] = ("-m", "optimum_memopt.measure.measure_case")) -> Measurement:
    """Measure the case in a fresh process.

    Args:
        program: a Python script or module that calls `main` with the case's class.

    Raises:
        MemOptError: the process failed; the message is the last line of its error.
    """
    done = subprocess.run([sys.executable, *program], input=case.to_json(), capture_output=True, text=True)
    if done.returncode != 0:
        raise MemOptError(_reason(done.returncode, done.stderr))
    remarks = (line.removeprefix(_REMARK) for line in done.stderr.splitlines() if line.startswith(_REMARK))
    return replace(Measurement.from_json(done.stdout.splitlines()[-1]), remarks=tuple(dict.fromkeys(remarks)))


def _reason(returncode: int, stderr: str) -> str:
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = ", probably out of memory" if -returncode == signal.SIGKILL else ""
        return f"the measured process was killed by {name}{hint}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"the measured process failed with exit code {returncode}"


def main(kind: type[Case] = Case) -> None:
    """Measure the case on standard input, one of the class `kind`."""
    try:
        print(measure(kind.from_json(sys.stdin.read())).to_json())
    except MemOptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
