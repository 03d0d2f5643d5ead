"""Layer 4. absent GPUs as a target, the compiled program, and what its HLO says."""
