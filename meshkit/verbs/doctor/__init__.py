"""doctor: what is wrong with this installation and this machine, before a job finds out.

environment, files, packages -> checks -> Diagnosis (JSON, terminal); with a gang: one collective over all processes
"""
