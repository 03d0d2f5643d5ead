"""Layer 4. the step, its state and its data; capture of real steps."""
