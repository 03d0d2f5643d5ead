"""Flax models that run on any meshkit mesh. Experiments name them by import path. meshkit's wheel contains them."""
