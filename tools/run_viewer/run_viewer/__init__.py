"""What the model did, token by token, out of a run's parquet files."""
