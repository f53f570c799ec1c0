"""Memory, time and rollout planning before any GPU is asked for. See docs/planning.md."""
