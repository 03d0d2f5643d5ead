"""Connect the processes of one job: the environment contract, the roll call, joining, and agreements on values.

Enters: variables that a launcher sets. Leaves: a joined jax.distributed job.
May be imported by whatever runs in several processes: step, compile, verbs.
"""
