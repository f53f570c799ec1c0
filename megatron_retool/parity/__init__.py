"""Whether it is right: a machine (doctor), a model (admission), a run's log-probs (referee), each against an
independent computation."""
