"""Layer 1. What the user writes: clusters, meshes, rules, experiments. Imports no jax, and this module nothing at all.

catalog, cluster -> mesh -> rules -> experiment is the flow; locate, document, validate and problems turn a mistake into
one message with file, line, key and a way out.
"""
