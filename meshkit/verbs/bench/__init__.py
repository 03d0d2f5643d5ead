"""`meshkit bench`: collectives and rates of the devices present.

Enters: an experiment's mesh on attached devices. Leaves: `BenchReport`, a calibration file that plan reads.
"""
