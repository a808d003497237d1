"""`optimum-cli memopt …`. Nothing heavy is imported before a command runs.

memopt  the group of commands and their arguments
plan    `memopt plan`
step    the flags of a step that is predicted
"""
