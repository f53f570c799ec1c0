"""Admission of a model family: a shrunk model with random weights, compared with transformers in every layout.

``admit.examine`` is the whole of it. ``megatron-retool admit`` calls it for the models that it is given, the test suite
for one of every built-in family.
"""
