"""Read and write the weights of a model as safetensors files, through a layout of names and dims.

Input: files or arrays, and a layout. Output: sharded arrays, or files that other programs read.
May be imported by checkpoints, train and models (`meshkit.weights.layout`).
"""
