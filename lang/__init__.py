"""Programs: `gen`, `select`, `fork` and `join` in plain Python, run as a graph the engine can see."""
