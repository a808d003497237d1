"""Runs the commands that the README and the pages show, and writes their output into them.

    python docs/outputs.py            # everything, ten minutes on two quiet cores
    python docs/outputs.py level-1    # only these
    python docs/outputs.py --check    # runs nothing: every block has its recipe, and the same text wherever it stands

The table of the settings of a planned step is written by each of them but the last, which checks it.
A block is a fence behind `<!-- output: NAME -->`. Blocks that show the same command show the same run of it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/sft/README.md")
BLOCK = re.compile(
    r"^(?P<marker> *<!-- output: (?P<name>\S+) -->\n\n?) *```\n(?P<text>(?:.*\n)*?) *```$", re.MULTILINE
)
SETTINGS = re.compile(r"(?<=<!-- settings: begin -->\n\n).*(?=\n<!-- settings: end -->)", re.DOTALL)
SETTINGS_PAGE = ROOT / "docs/plan.md"
WIDTH = 132
ELLIPSIS = "…"
# What makes a run shorter or quieter, and nothing that is shown different.
QUIET = "--report_to none --save_strategy no --disable_tqdm true --max_eval_samples 16"
SECONDS = 1200


@dataclass(frozen=True)
class Output:
    """The part that a page shows of commands that run one after another.

    Attributes:
        commands: as a user types them.
        lines: what is shown, in this order: a regular expression of whole lines, of which only the groups are shown
            where it has any; a pair of them for all lines from the first up to the second; or `ELLIPSIS`.
        is_prompt_shown: whether the block begins with the commands.
    """

    commands: tuple[str, ...]
    lines: tuple[str | tuple[str, str], ...]
    is_prompt_shown: bool = True

    def render(self, printed: str) -> str:
        """The text of the block.

        Raises:
            ValueError: a line of the recipe is not in what was printed.
        """
        lines = [line.split("\r")[-1].rstrip() for line in printed.splitlines()]
        prompts = [f"$ {command}" for command in self.commands] if self.is_prompt_shown else []
        shown = [line for selector in self.lines for line in _select(lines, selector)]
        return "\n".join([*prompts, *(wrapped for line in shown for wrapped in _wrap(line))]) + "\n"


def _select(lines: list[str], selector: str | tuple[str, str]) -> list[str]:
    if selector == ELLIPSIS:
        return [ELLIPSIS]
    if isinstance(selector, tuple):
        start = _first(lines, 0, selector[0])
        return lines[start : _first(lines, start, selector[1]) + 1]
    matches = [match for line in lines if (match := re.fullmatch(selector, line))]
    if not matches:
        raise ValueError(f"no line is {selector!r}")
    shown = (f"{' '.join(match.groups())} {ELLIPSIS}" if match.groups() else match[0] for match in matches)
    return list(dict.fromkeys(shown))


def _first(lines: list[str], start: int, pattern: str) -> int:
    for at in range(start, len(lines)):
        if re.fullmatch(pattern, lines[at]):
            return at
    raise ValueError(f"no line is {pattern!r}")


def _wrap(line: str) -> list[str]:
    """Prose in several lines. A row of a table, which has gaps, and flags to paste stay in one."""
    if "  " in line or line.startswith("--"):
        return [line]
    return textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]


TRAIN = r"""python examples/run_glue/run_glue.py --output_dir runs --use_cpu true \
    --max_train_samples 192 --max_steps 3 """
TOO_LARGE = (
    TRAIN
    + r"""--per_device_train_batch_size 64 \
    --memory_opt_engine compile --memory_opt_budget 1300MiB""",
)
FITS = (
    TRAIN
    + r"""--per_device_train_batch_size 32 --gradient_accumulation_steps 2 \
    --memory_opt_engine compile --memory_opt_budget 1300MiB --memory_opt_report report.html --log_input_density""",
)
LEVEL = (TRAIN + "--per_device_train_batch_size 16 --memory_opt_engine compile --memory_opt_level 1",)
INDUCTOR = (f"{LEVEL[0]} --memory_opt_compiler inductor",)
ORT = (TRAIN + '--per_device_train_batch_size 16 --memory_opt_engine ort --memory_opt_config "Gelu+:1:-1"',)
LLAMA = (
    'python -c "from transformers import LlamaConfig; LlamaConfig(hidden_size=1024, intermediate_size=2816, '
    "num_hidden_layers=8, num_attention_heads=16, vocab_size=32000).save_pretrained('llama')\""
)
ROBERTA = (
    'python -c "from transformers import RobertaConfig; RobertaConfig(num_hidden_layers=2, vocab_size=8192)'
    ".save_pretrained('roberta')\""
)
# A step that takes more than the process may have beyond its imports. The pages show no command of it.
LACKING = """python -c '
import resource
from pathlib import Path
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
import optimum_memopt.engines.compile.train.engine
from optimum_memopt import MemOptTrainer, MemOptTrainingArguments

status = Path("/proc/self/status").read_text().split()
held = int(status[status.index("VmData:") + 1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (held + (640 << 20), resource.RLIM_INFINITY))
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(5, 4000, (256, 128)).tolist()]
args = MemOptTrainingArguments("runs", per_device_train_batch_size=128, max_steps=2, use_cpu=True, report_to="none",
                               disable_tqdm=True)
sizes = dict(n_embd=128, n_layer=2, n_head=4, n_positions=128, vocab_size=4000, bos_token_id=2, eos_token_id=3)
MemOptTrainer(GPT2LMHeadModel(GPT2Config(**sizes)), args, train_dataset=Dataset.from_list(rows)).train()
'"""
MISTAKE = TRAIN + "--per_device_train_batch_size 16 --memory_opt_engine compile"
MISTAKES = (
    f'{MISTAKE} --memory_opt_config "Gellu+:1:-1"',
    f"{MISTAKE} --memory_opt_level 5",
    f'{MISTAKE} --memory_opt_config "Gelu+:9:-1"',
)
PLAN = (
    ROBERTA,
    "optimum-cli memopt plan --model roberta/ --task fill-mask --batch_size 8 --seq_len 256 "
    "--device h100 --bf16 --compiler aot_eager",
)

ADVISE = (
    "python -c 'from transformers import LlamaConfig; LlamaConfig(hidden_size=2048, intermediate_size=8192, "
    "num_hidden_layers=16, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True)"
    """.save_pretrained("llama-1b")'""",
    "optimum-cli memopt advise --model llama-1b/ --task text-generation --seq_len 2048 --device h100 --bf16 "
    "--global_batch 256 --budget 72GiB",
)

LLAMA_1B = """python -c 'from transformers import LlamaConfig
LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_key_value_heads=8,
    tie_word_embeddings=True, dtype="bfloat16",
).save_pretrained("llama")'"""

LLAMA_3B = """python -c 'from transformers import LlamaConfig
LlamaConfig(
    vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, tie_word_embeddings=True, dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
).save_pretrained("llama-3b")'"""


def written(name: str, begin: str) -> tuple[str, str]:
    """Commands that write a model's config, and the Python of docs/plan.md that begins so."""
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    code = page[page.index(f"```python\n{begin}") :].split("```")[1].removeprefix("python\n")
    return LLAMA_1B, f"cat > {name} <<'END'\n{code}END"


TITLE, PREDICTED = r"RobertaForSequenceClassification in .*", r"Predicted (for the first batch|peak of a step).*"
TABLE_HEAD = (r"Plan +Config .*", r"3 +.*")
COMPILED = r"\[memopt\] compiled the training graph .*"
AT_THE_PEAK = r"\[memopt\] predicted .* at the peak of the run.*"

OUTPUTS = {
    "versions": Output(
        ("optimum-cli memopt env",),
        (
            "installed .*",
            r"python +\d.*",
            r"torch +\d.*",
            r"transformers +\d.*",
            r"accelerate +\d.*",
            r"deepspeed +\d.*",
        ),
    ),
    "too-large": Output(TOO_LARGE, ("error: .*",)),
    "fits": Output(FITS, (TITLE, AT_THE_PEAK, r"\[memopt\] wrote the report .*")),
    "fits-compiled": Output(FITS, (COMPILED,), is_prompt_shown=False),
    "level-1-compiled": Output(LEVEL, (COMPILED,), is_prompt_shown=False),
    "inductor-compiled": Output(INDUCTOR, (COMPILED,), is_prompt_shown=False),
    "fits-summary": Output(
        FITS,
        (
            "engine  .*",
            r"(plans on .*?\(\d+ of \d+\), .*?\(\d+ of \d+\), .*?\(\d+ of \d+\),).*",
            "(?:claimed saving|predicted peak|measured peak|samples/s)  *.*",
        ),
    ),
    "level-1": Output(
        LEVEL,
        (
            TITLE,
            "Predicted for the first batch.*",
            "Predicted peak of a step.*",
            TABLE_HEAD,
            ELLIPSIS,
            "First batch: .*",
            "On: .*",
            AT_THE_PEAK,
        ),
    ),
    "ort-summary": Output(ORT, (("engine  .*", "samples/s  .*"),)),
    "lacking": Output(
        (LACKING,),
        (
            (r"\[memopt\] memory ran out .*", "  forward, .*"),
            ELLIPSIS,
            ("suggestions", " +predicted peak .*, time not known.*"),
        ),
        is_prompt_shown=False,
    ),
    "lacking-report": Output(
        (LACKING,),
        ((r"\[memopt\] memory ran out .*", " +predicted peak .*: every layer is recomputed .*"),),
        is_prompt_shown=False,
    ),
    "batch-sizes": Output(
        (
            LLAMA,
            "optimum-cli memopt plan --model llama/ --task text-generation --batch_size 8,16,32,64 --seq_len 512 "
            "--device h100 --bf16",
        ),
        ((r"LlamaForCausalLM in float32 on H100 .*", r" +64 .*"),),
    ),
    "advice": Output(
        (
            "optimum-cli memopt advise --model llama/ --task text-generation --seq_len 512 --device h100 --bf16 "
            "--budget 8GiB",
        ),
        (
            ("LlamaForCausalLM in float32 on H100, .*", "Trainer's checkpointing, every layer .*"),
            ELLIPSIS,
            ("Recommended: .*", "--per_device_train_batch_size .*"),
        ),
    ),
    "advise": Output(ADVISE, (("LlamaForCausalLM .*", "--per_device_train_batch_size .*"),)),
    "advise-optimizers": Output(
        (*ADVISE[:-1], f"{ADVISE[-1]} --optim all"),
        (("Optimizers in this setup .*", "Unknown: .*"),),
        is_prompt_shown=False,
    ),
    "sft": Output(
        (
            r"""python examples/sft/sft.py --use_cpu true --output_dir runs --max_train_samples 64 \
    --per_device_train_batch_size 16 --max_steps 3 --max_length 128 --lora --bf16 false \
    --memory_opt_engine compile --memory_opt_level 1""",
        ),
        (
            r"\[memopt\] activation checkpointing of .*",
            "PeftModelForCausalLM in .*",
            "Predicted for the first batch.*",
            "On: .*",
            AT_THE_PEAK,
        ),
    ),
    "sft-example": Output(
        (
            r"""python examples/sft/sft.py --use_cpu true --output_dir runs/sft \
    --max_train_samples 640 --max_eval_samples 160 --per_device_train_batch_size 16 --num_train_epochs 1 \
    --max_length 128 --learning_rate 1e-3 --warmup_steps 0.1 --logging_steps 10 --save_strategy no \
    --bf16 false --gradient_checkpointing false \
    --memory_opt_engine compile --memory_opt_level 1 --log_memory_phases""",
        ),
        (
            ("LlamaForCausalLM in float32 .*", "Predicted peak .*"),
            r"(Plan +Config +Freq +Max Saving\(Bytes\)).*",
            r"(-{6}  -{3}  -+  -+  -+).*",
            r"([1-4] +ON +\S+ +\S+ +\S+).*",
            ELLIPSIS,
            "On: .*",
            (r"step 32 \(MiB.*", "post_optimizer_step .*"),
            AT_THE_PEAK,
            "samples/s .*",
        ),
        is_prompt_shown=False,
    ),
    "deepspeed": Output(
        (
            """echo '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", """
            """"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}' > ds_zero2.json""",
            r"""DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 examples/run_glue/run_glue.py \
    --use_cpu true --deepspeed ds_zero2.json --output_dir runs --max_steps 2 \
    --max_train_samples 200 --max_seq_length 64 --per_device_train_batch_size 8 \
    --memory_opt_engine compile --memory_opt_level 1""",
        ),
        (TITLE, "On: .*", AT_THE_PEAK),
    ),
    "mistakes": Output(
        MISTAKES,
        (r"(error: no plan .* Available: \S+ \S+ \S+ \S+).*", "error: --.*", "error: memory-.*"),
        is_prompt_shown=False,
    ),
    "plan-device": Output(PLAN, (r"RobertaForMaskedLM in float32 on H100 .*", "Predicted (?:for|peak) .*")),
    "plan-at-peak": Output(
        (ROBERTA, f"{PLAN[-1]} --at_peak"),
        (("Tensors at the predicted peak.*", r"saved activations +Gelu\+ .*"), ELLIPSIS, "predicted peak .*"),
        is_prompt_shown=False,
    ),
    "plan-ways": Output(
        (
            LLAMA_3B,
            "optimum-cli memopt plan --ways plain --model llama-3b/ --peft r=32,target=q_proj+v_proj --batch_size 4 "
            "--seq_len 729 --device l40s --optim adamw_torch --keep_outputs",
        ),
        (("text-generation, 4 rows .*", "outputs and variables .*"),),
        is_prompt_shown=False,
    ),
    "plan-batch-sizes": Output(
        (
            ROBERTA,
            r"""optimum-cli memopt plan --model roberta/ --task fill-mask --seq_len 256 --device h100 --bf16 \
    --compiler aot_eager --batch_size 1,2,4,8,16,32 --optim adafactor --gradient_accumulation_steps 4""",
        ),
        ((r"RobertaForMaskedLM in float32 on H100 .*", r" +32 .*"),),
    ),
    "dry-run": Output(
        (
            *written("finetune.py", "from datasets"),
            "optimum-cli memopt dry-run --device h100 finetune.py --output_dir runs --bf16",
        ),
        ((r"Trainer, LlamaForCausalLM.*", "temporaries .*"),),
        is_prompt_shown=False,
    ),
    "simulate": Output(
        (*written("step.py", "import torch"), "python step.py"),
        (("step  .*", "parameters .*"),),
        is_prompt_shown=False,
    ),
}


def blocks(page: Path) -> dict[str, str]:
    """The outputs that a page shows, by name."""
    return {
        match["name"]: textwrap.dedent(match["text"]) for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
    }


def settings() -> str:
    """The page with the settings of a planned step as their dataclasses declare them."""
    from optimum_memopt.step_settings import described

    rows = [f"| `{flag}` | `{keyword}` | {meaning} |" for flag, keyword, meaning in described()]
    table = "\n".join(("| flag | in Python | meaning |", "|---|---|---|", *rows, ""))
    return SETTINGS.sub(lambda _: table, SETTINGS_PAGE.read_text(encoding="utf-8"))


def check() -> list[str]:
    """The mistakes of the pages: a line each."""
    shown = [(page, name, text) for page in PAGES for name, text in blocks(page).items()]
    marked = [(page, name) for page in PAGES for name in re.findall(r"<!-- output: (\S+) -->", page.read_text())]
    texts: dict[str, set[str]] = {}
    for _, name, text in shown:
        texts.setdefault(name, set()).add(text)
    return [
        *(
            f"{page.name}: no fenced block behind the marker of {name}"
            for page, name in set(marked) - {mark[:2] for mark in shown}
        ),
        *(f"{page.name}: no output is called {name}" for page, name, _ in shown if name not in OUTPUTS),
        *(f"{name} stands in no page" for name in OUTPUTS if name not in texts),
        *(f"{name} is shown with different text" for name, different in texts.items() if len(different) > 1),
        *(["the table of settings is an old one"] if settings() != SETTINGS_PAGE.read_text(encoding="utf-8") else []),
    ]


def run(commands: tuple[str, ...], folder: Path) -> str:
    """The text that the commands print, on both streams."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "400",
        # Every run compiles, and measures its operators, as a first one does.
        "OPTIMUM_MEMOPT_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    printed = ""
    for command in commands:
        quiet = f" {QUIET}" if "examples/" in command else ""
        begin = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command + quiet],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        print(
            f"{time.monotonic() - begin:5.0f} s, exit status {done.returncode}: {' '.join(command.split())[:110]}",
            flush=True,
        )
        printed += done.stdout
    return printed


def write(texts: dict[str, str]) -> None:
    """Replace the blocks of these names in all pages."""

    def replaced(match: re.Match[str]) -> str:
        if match["name"] not in texts:
            return match[0]
        indent = re.match(" *", match["marker"])[0]  # type: ignore[index]
        return match["marker"] + textwrap.indent(f"```\n{texts[match['name']]}```", indent)

    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := BLOCK.sub(replaced, text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(OUTPUTS)}")
    parser.add_argument("--check", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if arguments.check:
        wrong = check()
        print(*wrong, sep="\n", end="\n" if wrong else "")
        return bool(wrong)
    SETTINGS_PAGE.write_text(settings(), encoding="utf-8")
    printed: dict[tuple[str, ...], str] = {}
    texts, failed = {}, []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "examples").symlink_to(ROOT / "examples")
        for output in arguments.names or OUTPUTS:
            commands = OUTPUTS[output].commands
            if commands not in printed:
                printed[commands] = run(commands, Path(name))
            try:
                texts[output] = OUTPUTS[output].render(printed[commands])
            except ValueError as error:
                failed.append(output)
                print(f"{output}: {error}; printed was:\n{printed[commands][-6000:]}", file=sys.stderr)
    write(texts)
    if failed:
        print(f"not written: {' '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
