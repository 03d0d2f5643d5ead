"""`meshkit checkpoint`, and the checkpoints of a training: write, verify, restore and export them.

Input: a state on its shardings. Output: orbax's arrays with a manifest; the state restored on any mesh; weights.
May be imported by train.
"""
