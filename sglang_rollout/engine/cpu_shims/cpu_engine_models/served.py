"""``EntryClass`` is the architecture that the engine process named in MEGATRON_RETOOL_ENGINE_MODEL (module:class)."""

import importlib
import os

_module, _, _name = os.environ["MEGATRON_RETOOL_ENGINE_MODEL"].partition(":")
EntryClass = getattr(importlib.import_module(_module), _name)
