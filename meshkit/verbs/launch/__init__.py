"""Starts a job of several processes: here, or by SLURM, Kubernetes or MPI.

experiment -> Job -> local gang with a supervisor | sbatch script | JobSet | mpirun script
"""
