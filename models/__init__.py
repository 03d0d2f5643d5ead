"""Flax models that run on any meshkit mesh. Not part of the wheel: an experiment names its model by import path."""
