"""Layer 5. spans of time on devices: simulated, or read from a trace."""
