"""`optimum-cli memopt …`. Nothing heavy is imported before a command runs.

memopt  the group of commands and their arguments
plan    `memopt plan`
flags   the flags of commands that predict or measure a step
"""
