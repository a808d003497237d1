"""What gpu/acceptance.py makes of its checks; `tests/cuda` runs the checks."""

import math

import pytest
import torch
from gpu import report
from gpu.checks import FAIL, PASS, SKIP, Check, Figure, Outcome, Setting, crash, heard, within
from gpu.steps import error_of_all, largest_error, offload_config

from optimum_memopt.plans.table import PlanRow


def outcomes(run, **more):
    return list(Check("a check", run, **more).outcomes(Setting()))


def test_figures_pass_or_fail_by_their_limit():
    def run(setting):
        yield within("small", 0.5, 1.0)
        yield within("large", 2.0, 1.0)
        yield within("no number", math.nan, 1.0)

    found = outcomes(run)
    assert [(one.name, one.status) for one in found] == [("small", PASS), ("large", FAIL), ("no number", FAIL)]
    assert not any(one.crashed for one in found)
    assert str(found[1]).split() == ["FAIL", "a", "check:", "large", "2.00e+00", "1.00e+00"]


def test_an_error_is_a_failure_and_keeps_what_was_found(capsys):
    def run(setting):
        yield Figure("first", True, "1")
        raise RuntimeError("CUDA error: out of luck\nwith a second line")

    first, second = outcomes(run)
    assert first.status == PASS and second.crashed
    assert (second.status, second.figure) == (FAIL, "RuntimeError: CUDA error: out of luck")
    assert "out of luck" in capsys.readouterr().err


def test_a_check_without_what_it_needs_is_left_out():
    (found,) = outcomes(lambda setting: iter(()), needs=("no_such_module", "torch"))
    assert (found.status, found.figure) == (SKIP, "no_such_module not installed")


def test_what_others_print_is_no_event(capsys):
    assert heard("Loading weights\n") is None
    assert capsys.readouterr().err == "Loading weights\n"
    assert heard('@gpu {"begin": "a check"}\n') == {"begin": "a check"}


def test_errors_of_gradients():
    expected = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([0.0, 1e-9])}
    assert largest_error(expected, expected) == error_of_all(expected, expected) == 0
    ours = {"weight": torch.tensor([3.0, 4.5]), "bias": torch.tensor([1e-9, 0.0])}
    # The bias is noise beside the weight.
    assert largest_error(ours, expected) == pytest.approx(0.1)
    assert error_of_all(ours, expected) == pytest.approx(0.1)
    for wrong in ({"weight": expected["weight"]}, {**expected, "bias": torch.tensor([math.nan, 0.0])}):
        assert not largest_error(wrong, expected) <= 1
        assert not error_of_all(wrong, expected) <= 1


def test_all_rows_but_the_loss_are_offloaded():
    rows = [
        PlanRow(config=config, frequency=1, saving_bytes=1, saving_symbolic="")
        for config in ("Gelu+:1:-1", "Gelu+:2:-1", "Loss+:1:-1", "Attention+:3:-1")
    ]
    assert offload_config(rows) == "Gelu+:3:-1,Attention+:3:-1"


def test_the_report_is_a_table_of_the_page(tmp_path):
    found = [Outcome("a check", PASS, "a|b", "1 | 2", "3"), crash("another", "RuntimeError: no")]
    report.save(tmp_path / "out", "right", "a device", found)
    (tmp_path / "gpu.md").write_text("<!-- right: begin -->\n<!-- right: end -->\n")
    report.fill_docs(tmp_path / "out", tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert "a device" in text and "| FAIL | another" in text and "1 \\| 2" in text
