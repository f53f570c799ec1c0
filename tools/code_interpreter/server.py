"""``python -m tools.code_interpreter.server`` is ``code-interpreter``, the command of ``code_interpreter.server``."""

import sys

from code_interpreter.server import main

if __name__ == "__main__":
    sys.exit(main())
