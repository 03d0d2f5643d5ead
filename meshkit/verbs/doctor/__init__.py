"""doctor: find what is wrong with this installation and this machine before a job does.

environment, files, packages -> checks -> Diagnosis (JSON, terminal); with a gang: one collective over all processes
"""
