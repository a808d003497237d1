"""A second start of the same run under inductor: another process with the caches of the first one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from optimum_memopt.engines.torch_compat import dynamo
from tests import fresh_process
from tests.rotation import in_turn

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not dynamo.inductor_works("cpu"), reason="there is no C++ compiler"),
]

_SCRIPT = """
import json, sys
import torch, transformers
import optimum_memopt
from torch._dynamo.utils import counters

options, rows = json.loads(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, use_cache=False
)
model = transformers.LlamaForCausalLM(config).train()
ids = torch.randint(64, (rows, 8))
plain = model(input_ids=ids, labels=ids).loss.item()
memopt = optimum_memopt.optimize(
    model, memory_opt_engine="compile", memory_opt_compiler="inductor", memory_opt_unit="layer", **options
)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for _ in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
inductor = counters["inductor"]
print(json.dumps({
    "plain": plain, "losses": losses, "plans": json.loads(memopt.plans().to_json())["plans"],
    "hits": inductor["fxgraph_cache_hit"], "misses": inductor["fxgraph_cache_miss"],
}))
"""
LEVEL = {"memory_opt_level": 1}


class Caches:
    """Caches in a folder, shared by the processes that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, options: dict[str, Any], rows: int = 4) -> dict[str, Any]:
        """Train with these options in a process, and return its printed results."""
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "OPTIMUM_MEMOPT_CACHE": str(self.folder / "own"),
        }
        done = fresh_process.run("-c", _SCRIPT, json.dumps(options), rows, environment=environment, timeout=900)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    @property
    def entries(self) -> list[Path]:
        """Returns the files of inductor's compiled graphs."""
        return [path for path in (self.folder / "fxgraph").rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Caches:
    return Caches(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="module")
def first(caches) -> dict[str, Any]:
    found = caches.start(LEVEL)
    assert found["hits"] == 0 and found["misses"] >= 4
    return found


@in_turn
def test_it_compiles_nothing_and_is_the_same_run(caches, first) -> None:
    second = caches.start(LEVEL)
    assert second["misses"] == 0 and second["hits"] == first["misses"]
    assert any(plan["applied_count"] for plan in second["plans"])
    assert {key: second[key] for key in ("losses", "plans")} == {key: first[key] for key in ("losses", "plans")}


@pytest.mark.nightly
def test_a_batch_of_another_size_gets_its_own_plan_table(caches, first) -> None:
    other = caches.start(LEVEL, rows=6)
    assert float.fromhex(other["losses"][0]) == pytest.approx(other["plain"], rel=1e-5)
    assert other["plans"] != first["plans"], "bytes of the batch that was cached"


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {**LEVEL, "memory_opt_loss": "chunked"}], ids=["no plan", "another loss"])
def test_another_option_is_compiled(caches, first, options) -> None:
    other = caches.start(options)
    assert other["misses"] > 0
    assert float.fromhex(other["losses"][0]) == pytest.approx(other["plain"], rel=1e-5)


@pytest.mark.nightly
def test_damaged_entries_are_replaced(caches, first) -> None:
    entries = caches.entries
    assert entries
    for number, entry in enumerate(entries):
        content = entry.read_bytes()
        entry.write_bytes(content[: len(content) // 2] if number % 2 else b"not an entry")
    found = caches.start(LEVEL)
    assert found["misses"] == first["misses"] and found["losses"] == first["losses"]
    again = caches.start(LEVEL)
    assert again["misses"] == 0 and again["losses"] == first["losses"]
