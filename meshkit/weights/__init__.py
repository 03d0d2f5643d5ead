"""Weights of a model in and out of safetensors files, through a layout of names and dims.

Enters: files and a layout. Leaves: arrays born sharded, or files that others read.
May be imported by checkpoints, train and models (`meshkit.weights.layout`).
"""
