"""Scheduled HLO of a compiled program, read into a Schedule: instructions, costs, groups, trips.

Enters: a serialized HloModuleProto. Leaves: a `Schedule`, with what each instruction computes, moves and communicates.
May be imported by predict, compile, trace, lint and report.
"""
