"""Read the scheduled HLO of a compiled program into a Schedule: instructions, costs, replica groups, trip counts.

Input: a serialized HloModuleProto. Output: a `Schedule` with the work and the communication of each instruction.

May be imported by its row of CONTRIBUTING.md and all rows above.
"""
