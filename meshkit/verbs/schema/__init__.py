"""`meshkit schema`: print the JSON Schema of an output, or of the experiment file."""
