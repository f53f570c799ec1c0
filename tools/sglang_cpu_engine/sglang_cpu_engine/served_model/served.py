"""``EntryClass`` is the architecture that the engine process named (``sglang_cpu_engine.environment``)."""

import importlib
import os

from sglang_cpu_engine import MODEL_CLASS_VARIABLE

_module, _, _name = os.environ[MODEL_CLASS_VARIABLE].partition(":")
EntryClass = getattr(importlib.import_module(_module), _name)
