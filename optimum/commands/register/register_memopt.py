"""Makes `optimum-cli memopt` appear: optimum imports every module of this namespace package at its start."""

from optimum_memopt.commands.memopt import MemOptCommand

REGISTER_COMMANDS = [MemOptCommand]
