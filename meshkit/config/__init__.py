"""What the user writes: clusters, meshes, rules, experiments. Imports no jax, and this module nothing at all.

Enters: TOML files and `--set`. Leaves: frozen values, or one message with file, line, key and a way out.
May be imported by everything but the base.
"""
