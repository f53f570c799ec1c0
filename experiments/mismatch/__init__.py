"""Experiments on the mismatch between engine and learner, and on the algorithms against it; docs/mismatch.md.

One command each, from the repository's root:

    python -m experiments.mismatch.collapse_and_cure
    python -m experiments.mismatch.where_it_lives
    python -m experiments.mismatch.top_p
    python -m experiments.mismatch.dapo_ablation
    python -m experiments.mismatch.ppo_and_arpo
    python -m experiments.mismatch.collapse_search
    python -m experiments.mismatch.collapse_search_dense

Each continues where it stopped, and has a --quick form of minutes.
"""
