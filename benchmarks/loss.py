"""Peak memory and time of a training step whose loss holds all logits at once, or one part at a time.

    python benchmarks/loss.py
    python benchmarks/loss.py --only "causal, 128k" --rounds 7 --json loss.json --docs docs
    python benchmarks/loss.py --quick

A step is forward and backward of one batch, in fp32. Each baseline trains in a process of its own from the same
weights and batch; rounds of one step each are interleaved. The compile engine trains as under Trainer: the logits are
not read. `plain` and `chunked` are its --memory_opt_loss, `eager` is PyTorch alone, `ort` is --ort_module_with_loss of
the ort engine (masked LM), `TRL` the fused head of TRL's SFTTrainer (causal LM), and `cut-cross-entropy` Apple's
library, in its implementation for torch.compile.

`peak MiB` is the peak of torch's allocator, gradients included, over what was held before the step; `resident` is the
same for the process's resident memory, which includes ONNX Runtime's allocations. `CPU-s` is the median over rounds,
and each ratio the median of the per-round ratios to plain.

Importing cut-cross-entropy requires Triton, which other packages would detect, so both may be installed in a folder of
their own: pip install --no-deps --target FOLDER cut-cross-entropy triton, and --packages FOLDER.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loss_worker import BASELINES, PLAIN, Case, is_chunked_by_auto, serve, versions
from shared import fill, to_markdown
from tqdm import tqdm

MASKED = Case(
    "masked LM, 15% labels", "masked", 30_000, hidden=512, layers=6, batch_size=16, seq_len=128, density=0.15
)
CAUSAL = Case("causal", "causal", 0, hidden=256, layers=2, batch_size=1, seq_len=512)
_VOCABULARIES = {"30k": 32_000, "128k": 128_256, "256k": 256_000}
# Vocabulary, sequences of 512 tokens, hidden size.
_SIZES = (
    ("30k", 1, 256),
    ("30k", 8, 256),
    ("30k", 32, 64),
    ("128k", 1, 512),
    ("128k", 1, 256),
    ("128k", 4, 256),
    ("256k", 1, 256),
    ("256k", 2, 128),
)
_DECIMALS = {"CPU-s": 2, "of plain": 2, " of plain ": 2, "  of plain  ": 2}


def cases() -> Iterator[Case]:
    yield MASKED
    for vocabulary, batch_size, hidden in _SIZES:
        name = f"causal, {vocabulary}, {512 * batch_size} tokens, hidden size {hidden}"
        yield replace(CAUSAL, name=name, vocabulary=_VOCABULARIES[vocabulary], hidden=hidden, batch_size=batch_size)


@dataclass
class Worker:
    """The process of a baseline.

    Attributes:
        process: the process, which answers each line with a line of JSON.
        error: why the baseline cannot train; empty if it can.
    """

    process: subprocess.Popen
    error: str = ""

    @classmethod
    def start(cls, case: Case, baseline: str, arguments: argparse.Namespace) -> "Worker":
        settings = {"case": asdict(case), "baseline": baseline, "threads": arguments.threads}
        command = [sys.executable, __file__, "--worker", json.dumps({**settings, "packages": arguments.packages})]
        worker = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        worker.error = worker._answer()["error"]
        return worker

    def ask(self, command: str) -> dict[str, float]:
        """Send the command `peak` or `step`, and return the answer in MiB and seconds."""
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        # Compilers and libraries also print to standard output.
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"error": f"the process ended with {self.process.wait()}"}


def measure(case: Case, names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all baselines of a case: `peak` and `resident` in MiB and `seconds` of each round, or `error`."""
    found: dict[str, Any] = {}
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            worker = Worker.start(case, name, arguments)
            workers[name] = worker
            found[name] = {"error": worker.error} if worker.error else {**worker.ask("peak"), "seconds": []}
        able = [name for name in names if not workers[name].error]
        for _ in range(arguments.rounds):
            for name in able:
                answer = workers[name].ask("step")
                found[name]["seconds"].append(answer["seconds"])
                found[name]["resident"] = max(answer["resident"], found[name].get("resident", 0.0))
    finally:
        for worker in workers.values():
            worker.stop()
    return found


def lines(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a case's table."""
    plain = found[PLAIN]
    for name, result in found.items():
        if "seconds" in result:
            ratios = [own / base for own, base in zip(result["seconds"], plain["seconds"], strict=True)]
            # ONNX Runtime does not use torch's allocator.
            is_counted = not name.startswith("ort")
            yield {
                "loss": name,
                "peak MiB": result["peak"] if is_counted else "",
                "of plain": result["peak"] / plain["peak"] if is_counted else "",
                "resident MiB": result["resident"],
                " of plain ": result["resident"] / plain["resident"],
                "CPU-s": statistics.median(result["seconds"]),
                "  of plain  ": statistics.median(ratios),
            }


def heading(case: Case) -> str:
    """Returns a description of a case."""
    tokens = case.batch_size * case.seq_len
    kind = "RoBERTa" if case.kind == "masked" else "Llama, tied embeddings"
    sizes = f"{kind}, {case.layers} layers of {case.hidden}, vocabulary {case.vocabulary:,}"
    batch = f"batch {case.batch_size} x {case.seq_len} = {tokens:,} tokens, {case.density:.0%} with a label"
    auto = "chunked" if is_chunked_by_auto(case) else "plain"
    return f"{sizes}, {batch}; `auto` takes {auto}"


def report(results: dict[str, Any], known: dict[str, Case]) -> str:
    parts = []
    for name, found in results.items():
        rounds = len(found[PLAIN]["seconds"])
        parts.append(f"{heading(known[name])}, {rounds} rounds:\n\n{to_markdown(list(lines(found)), _DECIMALS)}")
        parts += [f"{baseline}: {result['error']}" for baseline, result in found.items() if result.get("error")]
    return "\n\n".join(parts)


def shrunk(case: Case) -> Case:
    """Returns a smaller case that runs in a second."""
    return replace(case, vocabulary=1_000, hidden=64, layers=1, batch_size=min(case.batch_size, 4), seq_len=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression for names of cases")
    parser.add_argument("--losses", nargs="+", choices=BASELINES, default=list(BASELINES), help="plain always runs")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each baseline")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--packages", help="folder with cut-cross-entropy and triton, used only in its process")
    parser.add_argument("--quick", action="store_true", help="smoke test: tiny models and one round")
    parser.add_argument("--json", help="file with all measurements; cases in it are not repeated")
    parser.add_argument("--docs", help="folder whose loss.md is updated")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(json.loads(arguments.worker))
        return
    known = {case.name: shrunk(case) if arguments.quick else case for case in cases()}
    arguments.rounds = 1 if arguments.quick else arguments.rounds
    about = f"{versions()}; threads {arguments.threads}, dropout 0.1 in RoBERTa, fp32"
    path = Path(arguments.json) if arguments.json else None
    results: dict[str, Any] = {}
    if path and path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["conditions"] != about:
            sys.exit(f"error: --json {path}: measured under other conditions: {saved['conditions']}")
        results = saved["cases"]
    asked = [case for name, case in known.items() if re.search(arguments.only, name) and name not in results]
    for case in tqdm(asked, disable=None):
        names = [PLAIN, *(name for name, kinds in BASELINES.items() if case.kind in kinds and name != PLAIN)]
        results[case.name] = measure(case, [name for name in names if name in (PLAIN, *arguments.losses)], arguments)
        if path:
            path.write_text(json.dumps({"conditions": about, "cases": results}), encoding="utf-8")
    results = {name: results[name] for name in known if name in results}
    text = report({name: results[name] for name in results if re.search(arguments.only, name)}, known)
    print(f"{about}\n\n{text}")
    if arguments.docs:
        fill(Path(arguments.docs) / "loss.md", {"losses": report(results, known), "conditions": about})


if __name__ == "__main__":
    main()
