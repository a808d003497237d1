"""`optimum-cli memopt dry-run`: a script until its Trainer trains."""

from typing import Any

from optimum_memopt.sizes import parse_budget
from optimum_memopt.training.dry_run import run_script


def run(args: Any) -> None:
    """Show the phases of the script's run. Raises SystemExit with 0, or MemOptError."""
    budget = None if args.budget is None else parse_budget(args.budget)
    run_script(args.script, args.arguments, args.device, budget)
