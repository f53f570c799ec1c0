"""A model or a run's checkpoint behind the gateway, for any client and for the terminal (docs/serving.md)."""
