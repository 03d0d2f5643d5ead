"""Connect the processes of one job.

    environment.py: read the launcher's variables -> roll_call.py: check that all processes are there
    -> join.py: initialize jax.distributed, and let the processes agree on values

All code that runs in several processes (step, compile, verbs) may import this package.
"""
