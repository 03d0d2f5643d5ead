"""`meshkit explain`: show where every parameter and activation is placed, and why.

Input: an experiment. Output: placements, findings and the reasons for collectives, as `meshkit.explain/1`. May be
imported by the CLI and the package `meshkit`.
"""
