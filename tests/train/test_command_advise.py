"""`optimum-cli memopt advise`: it has the same flags for the step as `plan`."""

import json
import re
from argparse import ArgumentParser
from typing import Any

import pytest
from transformers import LlamaConfig

from optimum_memopt.commands import flags
from optimum_memopt.commands.memopt import AdviseCommand, PlanCommand
from optimum_memopt.engines.api.predictions import EagerSettings
from optimum_memopt.engines.compile.predict.plain_step import plain_step
from tests.rotation import in_turn, nightly

ROWS = 16
FLAGS = {
    "dtype": ("--dtype", "bfloat16"),
    "peft": ("--peft", "r=4,target=q_proj+v_proj"),
    "attention": ("--attention", "eager"),
    "no_padding": ("--no_padding",),
    "trainable": ("--trainable", "q_proj"),
    "keep_outputs": ("--keep_outputs",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 2}
    LlamaConfig(**sizes, vocab_size=2048, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


def run(*arguments: str) -> None:
    parser = ArgumentParser()
    AdviseCommand.parse_args(parser)
    AdviseCommand(None, parser.parse_args(arguments), from_defaults_factory=True, parser=parser).run()


@pytest.fixture
def asked(folder: str, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(*arguments: str) -> dict[str, Any]:
        device = "--device", "h100", "--budget", "8GiB", "--compiler", "aot_eager"
        capsys.readouterr()
        run("--model", folder, "--seq_len", "100", *device, "--json", *arguments)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return ask


@in_turn
@pytest.mark.parametrize("name", nightly(FLAGS, but=["no_padding"]))
def test_a_flag_of_the_step_changes_it(name: str, folder: str, asked: Any) -> None:
    def peak(*given: str) -> int:
        parser = ArgumentParser()
        PlanCommand.parse_args(parser)
        args = parser.parse_args(["--model", folder, "--seq_len", "100", "--device", "h100", *given])
        spec = flags.spec_of(args)
        return plain_step(flags.workload_of(args, ROWS), spec, EagerSettings(keeps_outputs=spec.keep_outputs)).peak

    advice = asked("--global_batch", str(ROWS), *FLAGS[name])
    plain = next(row for row in advice["rows"] if row["plan"] == "plain PyTorch" and row["rows"] == ROWS)
    assert plain["peak"] == peak(*FLAGS[name]) != peak()
    assert advice["weights"] == ("bfloat16" if name == "dtype" else "float32")


@in_turn
def test_all_optimizers_have_the_bytes_of_their_plans(
    folder: str, asked: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = asked("--global_batch", str(ROWS), "--optim", "all")
    setup, optimizers = advice["recommended"], {each["name"]: each for each in advice["optimizers"]}
    current = optimizers["adamw_torch_fused"]
    assert (current["saves"], current["peak"]) == (0, setup["peak"])
    assert current["largest"] == setup["largest"]
    sizes = [each["states"] + each["temporaries"] for each in advice["optimizers"]]
    assert sizes == sorted(sizes)
    assert all(
        each["saves"] == current["states"] - size for each, size in zip(advice["optimizers"], sizes, strict=True)
    )
    for name in ("adafactor", "adamw_torch", "sgd", "ademamix_8bit"):
        parser = ArgumentParser()
        PlanCommand.parse_args(parser)
        device = ("--device", "h100", "--compiler", "aot_eager", "--batch_size", "2", "--loss", "plain")
        arguments = ("--model", folder, "--seq_len", "100", *device, "--optim", name, "--json")
        PlanCommand(None, parser.parse_args(arguments), from_defaults_factory=True, parser=parser).run()
        parts = json.loads(capsys.readouterr().out)["parts"]
        assert (optimizers[name]["states"], optimizers[name]["temporaries"]) == (parts["optimizer"], parts["step"])
    (same,) = (row for row in asked("--global_batch", str(ROWS), "--optim", "sgd")["rows"] if is_setup(row, setup))
    assert same["peak"] == optimizers["sgd"]["peak"] and same["largest"] == optimizers["sgd"]["largest"]


def is_setup(row: dict[str, Any], setup: dict[str, Any]) -> bool:
    return all(row[key] == setup[key] for key in ("plan", "chunked_loss", "rows"))


@in_turn
def test_a_budget_that_a_larger_optimizer_exceeds(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", folder, "--seq_len", "100", "--device", "h100", "--compiler", "aot_eager")
    with pytest.raises(SystemExit):
        run(*arguments, "--global_batch", "1", "--budget", "1MiB")
    lowest = re.search(r"needs at least ([\d.]+) MiB", capsys.readouterr().err)
    assert lowest is not None
    # An optimizer with a third state takes 12 MiB more.
    run(*arguments, "--global_batch", "1", "--budget", f"{float(lowest[1]) + 3:.1f}MiB", "--optim", "all")
    table = capsys.readouterr().out.partition("Optimizers in this setup")[2]
    (ademamix,) = (line for line in table.splitlines() if line.startswith("ademamix "))
    (sgd,) = (line for line in table.splitlines() if line.startswith("sgd "))
    assert "too large" in ademamix and "too large" not in sgd
    assert "blockwise" in table and "factors second moments" in table and "Unknown: " in table


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--fsdp", "0"), "--fsdp 0: allowed: whole numbers from 1 to 1048576"),
        (("--fsdp", "8", "--device", "here"), "--fsdp 8: ranks are predicted only for a named device"),
        (("--fsdp", "8", "--keep_outputs"), "--keep_outputs with --fsdp: plain PyTorch on one device"),
        (("--fsdp", "8", "--no_padding"), "--no_padding with --fsdp: plain PyTorch on one device"),
        (("--dtype", "int3"), "--dtype"),
        (("--peft", "r=x"), "--peft"),
        (("--attention", "magic"), "--attention"),
        (("--optim", "everything"), "--optim everything: its memory is unknown; supported are adamw_torch_fused, "),
        (("--optim", "paged_adamw_8bit"), "--optim paged_adamw_8bit: its states move between host and device"),
        (("--trainable", "nothing_so_called"), "--trainable"),
        (("--global_batch", "0"), "--global_batch 0: allowed: whole numbers from 1 to 2147483648"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    flags: tuple[str, ...], line: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--model", folder, "--device", "h100", "--compiler", "aot_eager", *flags)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    (error,) = [shown for shown in printed.err.splitlines() if shown.startswith("error: ")]
    assert line in error and not printed.out


@pytest.mark.nightly
def test_a_rank_of_several_is_said(asked: Any) -> None:
    alone, shared = asked("--global_batch", str(ROWS)), asked("--global_batch", str(ROWS), "--fsdp", "8")
    assert not alone["remarks"]
    (remark,) = shared["remarks"]
    assert remark.startswith("Predicted for each of 8 ranks: ") and remark.endswith("their time is not counted")
    assert {row["plan"] for row in shared["rows"]} == {"no plan", "level 1", "budget"}
    peaks = [
        next(row["peak"] for row in found["rows"] if row["plan"] == "level 1" and row["chunked_loss"])
        for found in (alone, shared)
    ]
    assert peaks[1] < 0.85 * peaks[0]
