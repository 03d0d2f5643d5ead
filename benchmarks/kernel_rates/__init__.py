"""What kernels take: the tables of rates that ship, from published measurements."""
