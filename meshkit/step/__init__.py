"""The training step: model, state, data, loss, gradients, optimizer.

Enters: a StepSpec, rules and a mesh. Leaves: one jitted function that train runs and plan compiles, and its facts.
May be imported by compile, trace, linting and the verbs.
"""
