"""Plans as text and files. Pure: imports neither torch nor transformers.

grammar    the plan grammar `cluster_id:strategy:count`
matching   matches requests with the rows of a graph
table      the plan table
plan_file  plans of graphs as JSON
"""
