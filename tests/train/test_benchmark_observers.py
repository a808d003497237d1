import json
from pathlib import Path

from observers import CASES, measure


def test_each_case_runs_its_steps_in_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    measured = measure(list(CASES), 3, str(tmp_path))
    assert {case: len(steps) for case, steps in measured.items()} == dict.fromkeys(CASES, 3)
    assert all(step > 0 for steps in measured.values() for step in steps)
    records = [json.loads(line) for line in Path(tmp_path, "observed.jsonl").read_text().splitlines()]
    writing = sum(writes for _, _, writes, _ in CASES.values())
    assert sum(record.get("phase") == "post_backward" for record in records) == writing * 9
    assert sum(record.get("scope") == "step" for record in records) == writing * 9 * 2
