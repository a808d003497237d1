"""`optimum-cli memopt`: the group of this package's commands."""

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_memopt.commands.advise import AdviseCommand
from optimum_memopt.commands.env import EnvCommand
from optimum_memopt.commands.plan import PlanCommand


class MemOptCommand(BaseOptimumCLICommand):
    """Prints its help; the work is in the subcommands."""

    COMMAND = CommandInfo(name="memopt", help="See and trade what a training step keeps in memory.")
    SUBCOMMANDS = (
        CommandInfo(
            name="advise",
            help="Which micro-batch and which plan train a model fastest within a budget.",
            subcommand_class=AdviseCommand,
        ),
        CommandInfo(
            name="env", help="What is installed, what works here, what is missing.", subcommand_class=EnvCommand
        ),
        CommandInfo(name="plan", help="A model's memory plans, claimed and measured.", subcommand_class=PlanCommand),
    )
