"""What an example does once its trainer stands: train, save, evaluate, and say what came of it."""

from pathlib import Path

from transformers import Trainer

from optimum_memopt import run_summary


def train_and_evaluate(trainer: Trainer) -> dict[str, float]:
    """Train and evaluate, unless --do_train or --do_eval alone asks for one of them; the metrics of the evaluation."""
    args = trainer.args
    # --eval_strategy switches do_eval on by itself, so it says nothing about wanting an evaluation only.
    train = args.do_train or not args.do_eval or args.eval_strategy != "no"
    evaluate = args.do_eval or not args.do_train
    if train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
        _record(trainer, "train", {**result.metrics, "train_samples": len(trainer.train_dataset)})
    metrics = trainer.evaluate() if evaluate else {}
    if evaluate:
        _record(trainer, "eval", metrics)
    return metrics


def _record(trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def report(trainer: Trainer, results: dict[str, str]) -> None:
    """The end of the run: what the memory plan did, then the example's own results in the same columns; also in
    `summary.txt` of the output folder."""
    if trainer.is_world_process_zero():
        lines = "\n".join([run_summary(trainer), *(f"{name:<14} {value}" for name, value in results.items())])
        print(lines)
        Path(trainer.args.output_dir, "summary.txt").write_text(lines + "\n")
