"""A step that runs out of memory.

guard   watches a Trainer's steps
report  what was held, and what would have fit
replan  runs the step again, under a plan that fits
"""
