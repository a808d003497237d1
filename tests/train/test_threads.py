"""Predictions in several threads of a process equal those in one thread."""

import threading

import pytest

from optimum_memopt import optimize, plan, simulate
from tests.rotation import in_turn
from tests.trainer_runs import CASES, build


def together(calls):
    """Run the calls at the same time in separate threads, and return each result or exception by name."""
    found, start = {}, threading.Barrier(len(calls))

    def run(name):
        start.wait()
        try:
            found[name] = calls[name]()
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def step(model, batch):
    model(**batch).loss.backward()


def estimate(model, **asked):
    found = plan(model, batch_size=8, seq_len=16, device="h100", **asked)
    return [found.peak, *(way.peak for way in found.ways)]


@pytest.mark.nightly
def test_predictions_in_threads_are_those_of_one_thread():
    batch, model = CASES["small"].batch(), build("small")
    calls = {
        "a model": lambda: estimate(model),
        "the same model": lambda: estimate(model, level=1),
        "another one": lambda: estimate(build("small"), level=1),
        "a step": lambda: simulate(step, build("small"), batch, device="h100").peak,
        "the same step": lambda: simulate(step, build("small"), batch, device="h100").peak,
    }
    alone = {name: call() for name, call in calls.items()}
    assert together(calls) == alone


@in_turn
def test_a_plan_while_an_engine_trains():
    batch, trained = CASES["small"].batch(), build("small")
    engine = optimize(trained, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)

    def train():
        for _ in range(3):
            step(trained, batch)
        return len(engine.plans().enabled)

    calls = {"training": train, "a model": lambda: estimate(build("small"))}
    alone = {name: call() for name, call in calls.items()}
    engine.detach()
    engine.attach(trained)
    assert together(calls) == alone
