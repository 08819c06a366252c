"""Who calls whom: the loop, the client runtime, processes, checkpoints. Methods are known by protocol only."""
