"""Trains, saves and evaluates an example, and prints a summary."""

from pathlib import Path

from transformers import Trainer

from optimum_memopt import run_summary


def train_and_evaluate(trainer: Trainer) -> dict[str, float]:
    """Train and evaluate, or only one of them with --do_train or --do_eval; returns the evaluation metrics."""
    args = trainer.args
    # --eval_strategy sets do_eval, too; that does not mean evaluation only.
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
    """Print the summary of the memory plan and the example's own results in the same columns, and write both to
    `summary.txt` in the output folder; with --save_plan also write the plan."""
    if trainer.is_world_process_zero():
        lines = "\n".join([run_summary(trainer), *(f"{name:<14} {value}" for name, value in results.items())])
        print(lines)
        Path(trainer.args.output_dir, "summary.txt").write_text(lines + "\n")
        # TRL's arguments do not have this flag.
        if (path := getattr(trainer.args, "save_plan", None)) is not None:
            trainer.memopt.save_plan(path)
