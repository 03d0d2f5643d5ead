"""`meshkit bench`: measure collectives, and the compute and memory rates of the attached devices.

Input: an experiment's mesh on attached devices. Output: `BenchReport`, and a calibration file that plan reads.
"""
