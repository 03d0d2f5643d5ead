"""Starts a job of several processes: here, or by SLURM, Kubernetes or MPI. Layer 2; never imports jax.

experiment -> Job -> local gang with a supervisor | sbatch script | JobSet | mpirun script
"""
