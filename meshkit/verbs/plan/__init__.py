"""`meshkit plan`: predict a step on absent GPUs, with remedies if it does not fit, and sweeps over numbers of GPUs.

Input: an experiment, or a serialized program with a cluster and a mesh. Output: a Report, or a ScalingReport.
May be imported by the CLI. The planning itself, and `mk.plan`, is in `meshkit.planning` and `meshkit.search`.
"""
