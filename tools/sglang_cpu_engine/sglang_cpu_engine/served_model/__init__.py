"""The one model class a CPU engine serves, so that SGLang need not import its whole model zoo to start."""
