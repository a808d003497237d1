import json

import pytest

from optimum_memopt import InputDensityCallback, MemOptError, MemoryPhasesCallback, PlanStatsCallback, attach
from optimum_memopt.callbacks.reporting import JsonLines, json_lines
from tests.trackers import Marker
from tests.trainer_runs import log_lines

UNWRITABLE = {
    "a folder": "",
    "under a file": "file/found.jsonl",
    "no place for files": "/proc/found.jsonl",
    "a name that is too long": 300 * "x",
    "a NUL": "found\0.jsonl",
}


@pytest.mark.parametrize("path", UNWRITABLE.values(), ids=UNWRITABLE.keys())
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path, path):
    (tmp_path / "file").touch()
    for kind in (PlanStatsCallback, InputDensityCallback, MemoryPhasesCallback):
        with pytest.raises(MemOptError, match="the log file .* cannot be written .*--memory_opt_log_file") as error:
            kind(path=f"{tmp_path}/{path}" if not path.startswith("/") else path)
        assert "\n" not in str(error.value)


def test_attach_refuses_it_and_leaves_the_trainer_as_it_was(trainer_of, tmp_path):
    trainer = trainer_of([])
    before = list(trainer.callback_handler.callbacks), dict(vars(trainer))
    with pytest.raises(MemOptError, match="the log file"):
        attach(trainer, memory_opt_engine="compile", log_memory_phases=True, memory_opt_log_file=str(tmp_path))
    assert (trainer.callback_handler.callbacks, dict(vars(trainer))) == before


def test_other_ranks_neither_create_nor_check_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    JsonLines(tmp_path / "new" / "found.jsonl")
    JsonLines(tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_costs_the_log_and_says_so_once(trainer_of):
    path = "/dev/full"
    callbacks = [InputDensityCallback(path=path), MemoryPhasesCallback(path=path), Marker(path)]
    trainer = trainer_of(callbacks)
    with log_lines() as lines:
        trainer.train()
    assert trainer.state.global_step == 3
    assert [line for line in lines if "log file" in line] == [
        "stopped writing the log file /dev/full (No space left on device); training goes on"
    ]


def test_a_file_that_goes_away_is_written_anew_and_its_folder_is_not(tmp_path):
    folder = tmp_path / "run"
    file = json_lines(folder / "found.jsonl")
    assert json_lines(folder / "found.jsonl") is file
    file.append([{"a": 1}, {"a": 2}])
    assert [json.loads(line) for line in file.path.read_text().splitlines()] == [{"a": 1}, {"a": 2}]
    file.path.unlink()
    file.append([{"a": 3}])
    assert json.loads(file.path.read_text()) == {"a": 3}
    file.path.unlink()
    folder.rmdir()
    with log_lines() as lines:
        for _ in range(2):
            file.append([{"a": 4}])
    assert len(lines) == 1 and "No such file or directory" in lines[0]


def test_changing_the_folder_does_not_move_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = json_lines("found.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.append([{"a": 1}])
    assert json.loads((tmp_path / "found.jsonl").read_text()) == {"a": 1}
