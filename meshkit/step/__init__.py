"""The training step: model, state, data, loss, gradients, optimizer.

Enters: an experiment and a mesh. Leaves: one jitted function that train runs and plan compiles, and the facts of it.
May be imported by compile, trace, lint and the verbs.
"""
