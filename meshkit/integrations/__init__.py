"""Thin adapters that make programs of other trainers; each is imported only on use, and tested with the real package.

Input: a mesh, and settings by the trainer's own names. Output: an `mk.Program`. May be imported by the verbs, and
named by `program.make`.
"""
