"""Other people's trainers as programs: thin, imported only where they are asked for, each tested with the real package.

Enters: a mesh, and settings as the trainer calls them. Leaves: an `mk.Program`. May be imported by the verbs, and named
by `program.make`.
"""
