"""Compare the network model with measured collectives, and show what its constants are fitted to."""
