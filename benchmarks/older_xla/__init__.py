"""Programs as the XLA of December 2024 makes them: what the published runs of that time may have run."""
