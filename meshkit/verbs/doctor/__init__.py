"""doctor: what is wrong with this installation and this machine, before a job finds out.

environment, files, packages -> checks -> Diagnosis (JSON, terminal); with a gang: one collective over all processes
"""

from meshkit.verbs.doctor.checkup import examine
from meshkit.verbs.doctor.diagnosis import Diagnosis, Result

__all__ = ["Diagnosis", "Result", "examine"]
