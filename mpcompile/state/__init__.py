"""Where version 0.1 had loss scales: what it pickled, checkpoints among it, names this path."""
