"""benchmarks/loss.py: ratios, the page, and real processes."""

from dataclasses import replace

import loss
from loss_worker import PLAIN, is_chunked_by_auto

FOUND = {
    PLAIN: {"peak": 100.0, "resident": 200.0, "seconds": [1.0, 2.0, 4.0]},
    "chunked": {"peak": 40.0, "resident": 50.0, "seconds": [0.5, 1.6, 3.0]},
    "ort, loss inside": {"peak": 1.0, "resident": 100.0, "seconds": [2.0, 4.0, 8.0]},
    "TRL": {"error": "it is not installed"},
}


def test_ratios_of_time_are_of_the_same_round():
    _, chunked, ort = loss.lines(FOUND)
    assert (chunked["of plain"], chunked[" of plain "], chunked["  of plain  "]) == (0.4, 0.25, 0.75)
    assert chunked["CPU-s"] == 1.6
    assert (ort["peak MiB"], ort[" of plain "], ort["  of plain  "]) == ("", 0.5, 2)


def test_the_report_says_what_failed_and_what_auto_does():
    text = loss.report({"masked LM, 15% labels": FOUND}, {case.name: case for case in loss.cases()})
    assert (
        "vocabulary 30,000, batch 16 x 128 = 2,048 tokens, 15% with a label; `auto` takes chunked, 3 rounds:" in text
    )
    assert text.endswith("\n\nTRL: it is not installed")


def test_auto_leaves_few_tokens():
    assert not is_chunked_by_auto(replace(loss.CAUSAL, vocabulary=1_000, hidden=512))
    assert is_chunked_by_auto(replace(loss.CAUSAL, vocabulary=1_000, hidden=448))
