"""Handling of steps that run out of memory.

guard   watches a Trainer's steps
report  reports the memory held, and settings that would have fit
replan  reruns the step under a plan that fits
"""
