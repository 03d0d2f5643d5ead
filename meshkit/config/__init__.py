"""The sections that a user writes: clusters, meshes, rules, experiments. It imports no jax, and this module nothing.

Enters: TOML files and `--set`. Leaves: frozen values, or one message with file, line, key and a way out.
May be imported by everything but the base.
"""
