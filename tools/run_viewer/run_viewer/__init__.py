"""Pages of a run, from its files: curves, time, steps, responses token by token, and two runs compared."""
