"""`meshkit doctor`: find faults of this installation and this machine before a job fails of them.

environment, files, packages -> checks -> Diagnosis (JSON, terminal)
the processes of a job, with --gang -> rendezvous, one all-reduce over all of them -> Diagnosis
"""
