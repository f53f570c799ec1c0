#!/usr/bin/env bash
# Installs what is missing, then linting, type checks and all tests.
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
bin="${MEGATRON_RETOOL_VENV:-.venv}/bin"
if [[ $# -eq 0 ]]; then
  "$bin/ruff" check .
  "$bin/mypy"
  set -- -m "not real_weights"
fi
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec "$bin/python" -m pytest "$@"
