"""Connect the processes of one job.

    environment.py: read the launcher's variables -> roll_call.py: check that all processes are there
    -> join.py: initialize jax.distributed, and let the processes agree on values

Input: the variables that a launcher sets. Output: a joined jax.distributed job.
May be imported by all code that runs in several processes: step, compile, verbs.
"""
