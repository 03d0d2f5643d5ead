"""`meshkit checkpoint`, and the checkpoints of a training: written, verified, restored, exported.

Enters: a state on its shardings. Leaves: orbax's arrays with a manifest; the state again, on any mesh; weights.
May be imported by train.
"""
