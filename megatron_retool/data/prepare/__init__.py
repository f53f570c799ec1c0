"""Published data sets as this project's parquet files: `megatron-retool data prepare NAME` (docs/data.md)."""

NAMES = ("retool-sft", "dapo-math-17k", "aime-2024", "aime-2025", "gsm8k", "math-500")
"""Keys of datasets.DATA_SETS, for a command line that imports nothing slow."""
