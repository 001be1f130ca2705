"""What holds outputs to a structure: compiling it, following the output through it, and what it leaves of a tree."""
