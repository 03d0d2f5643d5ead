"""`meshkit doctor`: find faults of this installation and this machine before they make a job fail.

environment, files, packages -> checks -> Diagnosis (JSON, terminal)
the processes of a job, with --gang -> rendezvous, one all-reduce over all of them -> Diagnosis
"""
