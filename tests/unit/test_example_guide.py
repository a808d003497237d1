"""The commands of docs/guide.md can be read: their flags exist and their files are there."""

import re
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest
from transformers import HfArgumentParser

pytest.importorskip("datasets")
pytest.importorskip("sklearn")
pytest.importorskip("trl")

from trl import SFTConfig

from common.arguments import RowArguments
from optimum_memopt import MemOptOptions
from optimum_memopt.commands.advise import AdviseCommand
from optimum_memopt.commands.plan import PlanCommand
from run_glue import run_glue
from sft import sft

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide.md"
QUESTIONS = (
    "I get CUDA out of memory",
    "I want a bigger batch",
    "I use TRL, LoRA or DeepSpeed",
    "Which flag did what?",
)
KINDS = {
    "run_glue.py": (run_glue.GlueArguments, run_glue.ModelArguments, run_glue.TrainingArguments),
    "sft.py": (sft.ModelArguments, RowArguments, SFTConfig, MemOptOptions),
}


def commands() -> list[list[str]]:
    """Those behind a `$` in a block, with their line breaks joined."""
    text = GUIDE.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line.removeprefix("$ ")) for line in text.splitlines() if line.startswith("$ ")]


def test_every_question_has_a_command_and_its_output():
    sections = re.split(r"^## ", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == list(QUESTIONS)
    for section in sections:
        blocks = re.findall(r"^```\n(\$ .*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        assert any(len(block.replace("\\\n", " ").splitlines()) > 1 for block in blocks), section.splitlines()[0]


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words)[:60])
def test_a_command_can_be_read(words):
    scripts = [index for index, word in enumerate(words) if Path(word).name in KINDS]
    if scripts:
        (place,) = scripts
        parsed = HfArgumentParser(KINDS[Path(words[place]).name]).parse_args(words[place + 1 :])
        assert parsed.memory_opt_engine in ("auto", "compile", "ort")
    elif words[0] == "optimum-cli":
        assert words[1] == "memopt"
        parser = ArgumentParser()
        {"plan": PlanCommand, "advise": AdviseCommand}[words[2]].parse_args(parser)
        parser.parse_args(words[3:])
    else:
        # Files that the other commands take.
        assert words[:2] == ["python", "-c"] or words[0] == "echo"
    assert all((ROOT / word).is_file() for word in words if word.startswith("examples/"))
