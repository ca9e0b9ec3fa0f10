"""What needs no cloud: grids in process, child processes, Landlock."""
