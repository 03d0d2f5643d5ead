"""`meshkit rehearse`: run one GPU's part of a distributed step on one real GPU."""
