"""What all tests share: a directory for temporary files, theirs and of all that they start, which goes at the end.

``--basetemp`` keeps what tests wrote below ``tmp_path``.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from megatron_retool.scratch import scratch_directory

_until_the_end = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    _until_the_end.enter_context(scratch_directory())
    config.add_cleanup(_until_the_end.close)
