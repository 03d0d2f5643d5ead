"""`meshkit schema`: JSON Schemas of outputs and of the experiment file."""
