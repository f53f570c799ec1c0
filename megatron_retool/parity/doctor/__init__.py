"""`megatron-retool doctor`: proves the stack layer by layer, and says what is wrong (docs/gpu_first_run.md).

Without processes, and so tested without any: ``outcome`` (figures, bounds, verdicts), ``catalogue`` (the steps, in
order), ``report`` (the JSON file), ``table`` and ``readme``. ``runner`` gives each step a process of its own. The files
``*_steps`` hold what the steps of a group do; a step takes a ``Session`` and returns its figures.
"""
