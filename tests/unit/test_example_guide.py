"""Commands in the docs can be parsed, blocks of one output are equal in all pages, and every flag has a row."""

import importlib.util
import re
import shlex
import sys
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import HfArgumentParser

pytest.importorskip("datasets")
pytest.importorskip("sklearn")
pytest.importorskip("trl")

from trl import SFTConfig

from common.arguments import RowArguments
from optimum_memopt import MemOptOptions
from optimum_memopt.commands.memopt import AdviseCommand, EnvCommand, PlanCommand
from run_glue import run_glue
from sft import sft

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDE = DOCS / "guide.md"
PAGES = (ROOT / "README.md", GUIDE, *(DOCS / f"{name}.md" for name in ("budget", "config", "plan")))
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
    """Returns the commands after a `$` in a block, with continued lines joined, each once."""
    text = "\n".join(page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES)
    lines = dict.fromkeys(line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
    return [shlex.split(line) for line in lines]


def test_blocks_of_one_output_are_the_same_in_all_pages():
    specification = importlib.util.spec_from_file_location("outputs", DOCS / "outputs.py")
    outputs = importlib.util.module_from_spec(specification)
    sys.modules["outputs"] = outputs  # dataclasses looks the module up here.
    specification.loader.exec_module(outputs)
    assert outputs.check() == []


def test_every_flag_has_a_row():
    text = (DOCS / "flags.md").read_text(encoding="utf-8") + (DOCS / "ort.md").read_text(encoding="utf-8")
    missing = [field.name for field in fields(MemOptOptions) if not re.search(rf"^\|.*`--{field.name}\b", text, re.M)]
    assert missing == []


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
        {"plan": PlanCommand, "advise": AdviseCommand, "env": EnvCommand}[words[2]].parse_args(parser)
        parser.parse_args(words[3:])
    else:
        # Commands that write files for the other commands.
        assert words[:2] == ["python", "-c"] or words[0] == "echo"
    assert all((ROOT / word).is_file() for word in words if word.startswith("examples/"))
