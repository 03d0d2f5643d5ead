"""What a run loses when its processes are killed, stopped or broken at any moment: faults x phases, and a soak."""
