"""`meshkit bench`: measure collectives, and the compute and memory rates of the attached devices.

Enters: an experiment's mesh on attached devices. Leaves: `BenchReport`, and a calibration file that plan reads.
"""
