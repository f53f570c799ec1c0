"""A server of the Tinker protocol: clients write the training loop, the learner and the engines do the work
(docs/tinker.md)."""
