"""The built-in model families, one file each: a module with a ``FAMILY`` is found without being listed anywhere."""
