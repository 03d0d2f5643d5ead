"""`meshkit launch`: start a job of several processes, here or by SLURM, Kubernetes or MPI. Imports no jax.

Input: an experiment -> Job. Output: a supervised gang on this machine | sbatch script | JobSet | mpirun script.
May be imported by the CLI.
"""
