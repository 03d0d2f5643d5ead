"""`meshkit launch`: starts a job of several processes, here or by SLURM, Kubernetes or MPI. Imports no jax.

Enters: an experiment -> Job. Leaves: a local gang with a supervisor | sbatch script | JobSet | mpirun script.
May be imported by the CLI.
"""
