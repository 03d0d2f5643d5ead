"""Layer 6. one report: schema, summary, and its views. Imports no jax."""
