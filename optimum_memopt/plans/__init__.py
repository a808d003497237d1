"""Plans as text and files. Pure: imports neither torch nor transformers.

grammar    `cluster_id:strategy:count`
matching   requests and the plans that they mean
table      the plan table
plan_file  plans of graphs as JSON
"""
