"""Operators that give the same bits for the same row, in the engine and in the learner (learner.match_engine=exact).

``operators`` has one function for each operator of a dense or sparse decoder, on torch tensors; both sides call it.
``kernels`` is the arithmetic below. docs/mismatch.md lists what each computes and why both sides get the same number.
"""
