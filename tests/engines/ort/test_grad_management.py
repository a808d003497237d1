"""`--ort_mem_efficient_grad_mgmt`: what plain PyTorch gives, hook by hook and rank by rank, at a lower peak."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from optimum_memopt.engines.ort import extensions, missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason="no onnxruntime-training"),
    pytest.mark.extensions,
    pytest.mark.timeout(1800),
]

SETUP = """
import os, sys, torch
from tests.gradients import accumulate, assert_same_step, wrong_gradients
from tests.model_zoo import ZOO
import optimum_memopt

torch.set_num_threads(1)

def managed(model, **options):
    options = {"memory_opt_engine": "ort", "ort_fallback": False, "ort_mem_efficient_grad_mgmt": True, **options}
    return optimum_memopt.optimize(model, **options)
"""

HOOKS = """
def with_hooks(model):
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: fired.append(("gradient", name)))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: fired.append(("accumulated", name)))
    return fired

for name, options in (("roberta-mlm", {}), ("gpt2", {"memory_opt_level": 1})):
    case = ZOO[name]
    model, plain = case.build(), case.build()
    ours, expected = with_hooks(model), with_hooks(plain)
    engine = managed(model, **options)
    for step in range(3):
        if step == 2:  # Frozen midway.
            for one in (model, plain):
                for parameter in list(one.parameters())[:4]:
                    parameter.requires_grad_(False)
        assert_same_step(model, plain, case.batch(3 + step, 8, seed=step), case.batch(2, 5, seed=10 + step))
        assert ours and sorted(ours) == sorted(expected)
        ours.clear(), expected.clear()
    retrieved = sum(node.op_type == "PythonOp" for node in engine.graph.node)
    assert retrieved == sum(parameter.requires_grad for parameter in model.parameters()) - unused(model), retrieved
    assert bool(engine.plans().enabled) is bool(options)
    padding = getattr(model, "roberta", None) and model.roberta.embeddings.position_embeddings
    if padding:
        assert padding.weight.grad is None or not padding.weight.grad[padding.padding_idx].any()
    engine.detach()

# The next model of the process is not managed.
model = ZOO["roberta-mlm"].build()
engine = managed(model, ort_mem_efficient_grad_mgmt=False)
assert_same_step(model, ZOO["roberta-mlm"].build(), ZOO["roberta-mlm"].batch())
assert not [node for node in engine.graph.node if node.op_type == "PythonOp"]
"""

UNUSED = """
def unused(model):
    return sum(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
"""

RANKS = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.trainer_runs import make
from optimum_memopt import MemOptError

dist.init_process_group("gloo")
rank, case = dist.get_rank(), ZOO["roberta-mlm"]
model, plain = case.build(), case.build()
managed(model)
vectors = []
for one in (model, plain):
    parallel, optimizer = DistributedDataParallel(one), torch.optim.SGD(one.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        with parallel.no_sync():
            parallel(**case.batch(seed=20 * step + 5 + rank)).loss.backward()
        parallel(**case.batch(seed=20 * step + rank)).loss.backward()
        optimizer.step()
    vectors.append(torch.nn.utils.parameters_to_vector(one.parameters()).detach())
gathered = [torch.empty_like(vectors[0]) for _ in range(2)]
dist.all_gather(gathered, vectors[0])
assert torch.equal(*gathered)
torch.testing.assert_close(vectors[0], vectors[1], rtol=1e-5, atol=1e-6)

# What DDP looks for by default under a Trainer is not in the autograd graph.
try:
    make(sys.argv[1], "roberta-mlm", ort_mem_efficient_grad_mgmt=True)
except MemOptError as error:
    assert "add --ddp_find_unused_parameters false" in str(error), error
else:
    raise AssertionError("not refused")
make(sys.argv[1], "roberta-mlm", ort_mem_efficient_grad_mgmt=True, ddp_find_unused_parameters=False).train()
print("rank", rank, "is done", flush=True)
os._exit(0)  # gloo's threads abort the interpreter's end now and then.
"""

PEAK = """
from optimum_memopt.memory import malloc
from optimum_memopt.memory.peak_monitor import MIB, PeakMonitor

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(32)))
managed(model, ort_mem_efficient_grad_mgmt=sys.argv[1] == "managed")
batch, monitor = torch.rand(2, 1024), PeakMonitor("cpu")
for step in range(3):
    if step == 1:
        monitor.start_run()
    model(batch).mean().backward()
print(monitor.run_peak)
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SETUP + UNUSED + text))
    return str(path)


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gradients_and_hooks_are_those_of_plain_pytorch(environment_with_extensions, tmp_path):
    run([script(tmp_path, HOOKS)], environment_with_extensions)


def test_two_ranks_stay_bitwise_equal(environment_with_extensions, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script(tmp_path, RANKS)]
    said = run([*launch, str(tmp_path / "out")], environment_with_extensions)
    assert "rank 0 is done" in said and "rank 1 is done" in said


def test_the_peak_is_lower_when_gradients_add_up(environment_with_extensions, tmp_path):
    """128 MiB of parameters: without it a second set of gradients lies beside the first at the end of backward."""
    path = script(tmp_path, PEAK)
    plain, managed = (
        float(run([path, case], environment_with_extensions).split()[-1]) for case in ("plain", "managed")
    )
    assert managed < plain - 64


def test_it_needs_the_extensions(tmp_path, monkeypatch):
    from optimum_memopt import MemOptError, MemOptOptions

    monkeypatch.setenv(extensions.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(MemOptError, match=f"build them with: {extensions.BUILD_COMMAND}"):
        MemOptOptions(ort_mem_efficient_grad_mgmt=True).check()
