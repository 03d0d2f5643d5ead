"""Read and check what a user writes: clusters, meshes, rules and experiments. The package does not import jax.

Input: TOML files and `--set`. Output: frozen values, or one error with file, line, key and a hint. May be imported by
every row of CONTRIBUTING.md above `config`.
"""
