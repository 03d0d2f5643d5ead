"""Flax models that run on any meshkit mesh; an experiment names them by import path, in a clone and from the wheel."""
