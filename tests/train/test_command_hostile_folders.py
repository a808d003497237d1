"""`optimum-cli memopt plan` on folders that hold anything but a model: one line and exit code 2."""

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from optimum_memopt.commands.memopt import PlanCommand
from optimum_memopt.predict import workload
from tests.saved_configs import save


def refused(capsys, *arguments: str) -> str:
    parser = ArgumentParser()
    PlanCommand.parse_args(parser)
    asked = parser.parse_args(["--task", "fill-mask", "--seq_len", "9", "--engine", "compile", *arguments])
    with pytest.raises(SystemExit) as caught:
        PlanCommand(None, asked, from_defaults_factory=True, parser=parser).run()
    assert caught.value.code == 2
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert printed.out == "" and printed.err.endswith(f"{line}\n") and len(line) < 900
    return line


@pytest.mark.parametrize(
    "content, reason",
    [
        ("null", "TypeError: "),
        ("[]", "Unrecognized model"),
        ('"roberta"', "Unrecognized model"),
        ("", "not a valid JSON file"),
        ("\0", "not a valid JSON file"),
        ("[" * 100_000, "RecursionError: "),
    ],
    ids=["null", "list", "string", "empty", "nul", "deep"],
)
def test_a_config_that_is_none(tmp_path, capsys, content, reason):
    (tmp_path / "config.json").write_text(content)
    line = refused(capsys, "--model", str(tmp_path))
    assert line.startswith(f"error: --model {tmp_path}: ") and reason in line


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"num_attention_heads": 0}, "no model can be built from its config: ZeroDivisionError: "),
        ({"vocab_size": 0}, "no model can be built from its config: "),
        ({"hidden_act": "gelluu"}, "no model can be built from its config: KeyError: 'gelluu'"),
        ({"hidden_size": 2**40}, "no model can be built from its config: RuntimeError: "),
        ({"hidden_size": "32"}, "Field 'hidden_size' expected int, got str"),
        ({"num_hidden_layers": 10**6}, "its config asks for more than 500 modules; larger models are not measured"),
    ],
    ids=str,
)
def test_numbers_that_make_no_model(tmp_path, capsys, monkeypatch, changes, reason):
    monkeypatch.setattr(workload, "_MOST_MODULES", 500)
    folder = save(tmp_path, "roberta-mlm")
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    line = refused(capsys, "--model", folder)
    assert line.startswith(f"error: --model {folder}: {reason}") or reason in line


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--batch_size", "1000000000000000"], "--batch_size 1000000000000000 --seq_len 9: allowed are up to"),
        (["--seq_len", "10000000000"], "--seq_len 10000000000: allowed are up to "),
        (["--level", "1", "--output", "."], "--output .: is a folder; name a file in it"),
        (["--model", "x" * 300], "--model xxx"),
        (["--model", "a\0b"], r"--model a\x00b: neither a folder nor a file here"),
    ],
    ids=["batch", "length", "output", "long", "nul"],
)
def test_arguments_beyond_all_measure(tmp_path, capsys, arguments, reason):
    assert reason in refused(capsys, "--model", save(tmp_path, "roberta-mlm"), *arguments)


def test_plans_that_cannot_be_written_are_told(tmp_path, capsys):
    """The table has been printed by then."""
    parser = ArgumentParser()
    PlanCommand.parse_args(parser)
    arguments = ["--model", save(tmp_path, "roberta-mlm"), "--task", "fill-mask", "--seq_len", "9"]
    asked = parser.parse_args([*arguments, "--engine", "compile", "--level", "1", "--output", "/dev/full"])
    with pytest.raises(SystemExit):
        PlanCommand(None, asked, from_defaults_factory=True, parser=parser).run()
    printed = capsys.readouterr()
    assert "Predicted peak of a step" in printed.out
    assert "error: --output /dev/full: not written: No space left on device; the plans are " in printed.err
