"""Fine-tune a causal language model (fully, or with LoRA or QLoRA) with TRL's SFTTrainer under a memory plan: on a
dataset, on your own rows, or on verses from a pip package. Trains and evaluates; with --do_train or --do_eval does
only one of them."""

import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.utils import is_bitsandbytes_available
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import RowArguments, loading, parse
from common.data import load_rows, take
from common.training import report, train_and_evaluate
from common.verses import retellings
from optimum_memopt import MemOptError, MemOptOptions, attach, run


@dataclass
class ModelArguments:
    """The model to train, and whether to train only LoRA adapters."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Model id on the Hugging Face hub, or a folder. Default: a new Llama of 8 layers."},
    )
    lora: bool = field(default=False, metadata={"help": "Train LoRA adapters on all linear layers; freeze the rest."})
    qlora: bool = field(default=False, metadata={"help": "Like --lora, on a 4-bit base model (NF4)."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapters."})

    def __post_init__(self) -> None:
        if self.lora_r < 1:
            raise MemOptError(f"--lora_r must be at least 1, not {self.lora_r}")
        if self.qlora and not is_bitsandbytes_available():
            raise MemOptError("--qlora needs bitsandbytes: pip install bitsandbytes")

    @property
    def adapters(self) -> LoraConfig | None:
        """Returns the `peft_config` for SFTTrainer, None without adapters."""
        if not (self.lora or self.qlora):
            return None
        return LoraConfig(
            r=self.lora_r, lora_alpha=2 * self.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
        )


VOCABULARY = 4096
BEGIN, END, PAD = "<s>", "</s>", "<pad>"


def new_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Train a byte-pair tokenizer on `texts`; it adds `BEGIN` to a text, and TRL adds the end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[PAD, BEGIN, END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=PAD)


def new_llama(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Returns a new Llama with 7 million parameters, one seventh of them word embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=704,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def texts_of(rows: Dataset) -> Iterator[str]:
    """Yields the text values of all rows, to train a new tokenizer on."""
    return (value for row in rows for value in row.values() if isinstance(value, str))


def load_quantized(path: str, compute_dtype: torch.dtype) -> PreTrainedModel:
    """Load a checkpoint with NF4 weights in all linear layers but the head; the rest is float32 and frozen."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        # FSDP2 shards weights packed into a float type, but not bytes.
        bnb_4bit_quant_storage=compute_dtype if PartialState().num_processes > 1 else torch.uint8,
    )
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    # SFTTrainer itself turns on gradient checkpointing if it is requested.
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def load(
    args: ModelArguments, rows: Dataset, compute_dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that the arguments name, or make a new model with a tokenizer for `rows`.

    Args:
        args: the model arguments.
        rows: the training rows.
        compute_dtype: the dtype of matrix products with quantized weights.
    """
    if args.model_name_or_path is None:
        tokenizer = new_tokenizer(texts_of(rows))
        model = new_llama(tokenizer)
        if args.qlora:
            if PartialState().num_processes > 1:
                raise MemOptError(
                    "--qlora on several ranks: the new base model is saved and loaded again, and transformers saves "
                    "on the first rank alone; name a checkpoint with --model_name_or_path"
                )
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                model = load_quantized(folder, compute_dtype)
            # Adapters store the path of their base model, and this folder no longer exists.
            model.name_or_path = model.config.name_or_path = ""
        return model, tokenizer
    path = args.model_name_or_path
    with loading("--model_name_or_path", path):
        model = load_quantized(path, compute_dtype) if args.qlora else AutoModelForCausalLM.from_pretrained(path)
        return model, AutoTokenizer.from_pretrained(path)


def results(metrics: dict[str, float]) -> dict[str, str]:
    """Returns how well the model continues the prompts of the evaluation rows."""
    if "eval_loss" not in metrics:
        return {}
    return {
        "perplexity": f"{math.exp(metrics['eval_loss']):.1f}",
        "token accuracy": f"{metrics['eval_mean_token_accuracy']:.3f}",
    }


def main() -> None:
    """Parse, load, train, evaluate, report."""
    model_args, row_args, training_args, memopt_options = parse(
        ModelArguments, RowArguments, SFTConfig, MemOptOptions, description=__doc__
    )
    set_seed(training_args.seed)
    splits = load_rows(row_args, retellings)
    model, tokenizer = load(model_args, splits["train"], torch.bfloat16 if training_args.bf16 else torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=take(splits["train"], row_args.max_train_samples),
        eval_dataset=take(splits["validation"], row_args.max_eval_samples),
        processing_class=tokenizer,
        peft_config=model_args.adapters,
    )
    attach(trainer, memopt_options)
    metrics = train_and_evaluate(trainer)
    report(trainer, results(metrics))


if __name__ == "__main__":
    run(main)
