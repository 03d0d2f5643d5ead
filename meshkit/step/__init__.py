"""The training step: model, state, data, loss, gradients, optimizer.

Input: a StepSpec, rules and a mesh. Output: one jitted function that train runs and plan compiles, and its facts.
May be imported by compile, trace, linting and the verbs.
"""
