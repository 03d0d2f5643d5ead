"""A plan: compile the training step for absent GPUs, simulate it, summarize it.

The verbs plan, tune, rehearse and explain share this code.
Input: an experiment, or a jitted function with abstract arguments on a described mesh. Output: a Plan with its report.
May be imported by the search and the verbs.
"""
