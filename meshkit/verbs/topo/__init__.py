"""`meshkit topo`: what this machine (or a recorded one) is, as a cluster, and where it differs from a declared one."""
