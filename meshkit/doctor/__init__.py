"""doctor: what is wrong with this installation and this machine, before a job finds out. Layer 7.

environment, files, packages -> checks -> Diagnosis (JSON, terminal); with a gang: one collective over all processes
"""

from meshkit.doctor.checkup import examine
from meshkit.doctor.schema import Diagnosis, Result

__all__ = ["Diagnosis", "Result", "examine"]
