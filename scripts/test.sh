#!/usr/bin/env bash
# Installs what is missing, then linting, type checks and the tests (under 20 minutes on two cores).
#
#   bash scripts/test.sh [--all | pytest arguments]
#
#   bash scripts/test.sh                             everything but slow tests and those with published weights
#   bash scripts/test.sh --all                       these too (three quarters of an hour)
#   bash scripts/test.sh -m slow                     tests that take minutes
#   bash scripts/test.sh tests/learner -k parity     a part, without linting and type checks
#
# `.venv/bin/pytest --help` has pytest's arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
bash scripts/setup.sh
bin="${MEGATRON_RETOOL_VENV:-.venv}/bin"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [[ $# -eq 0 || "$*" == --all ]]; then
  "$bin/ruff" check .
  "$bin/ruff" format --check --quiet .
  "$bin/mypy"
  "$bin/lint-imports" --no-logo
  "$bin/vulture"
  which="not slow and not real_weights"
  # All of them; weights are downloaded only where the expression names them.
  if [[ $# -ne 0 ]]; then which="real_weights or not real_weights"; fi
  # More files at a time than this has cores, for much of a test is waiting; long ones begin early, in their order.
  status=0
  "$bin/python" -m pytest -m "$which" -n 3 --dist loadfile --no-loadscope-reorder || status=$?
  [[ "$status" -eq 1 ]] || exit "$status"
  # A deadline that is missed beside other tests shows nothing about the code; a fault also fails by itself.
  echo "test.sh: testing what failed again, one at a time" >&2
  exec "$bin/python" -m pytest -m "$which" --last-failed --last-failed-no-failures none --maxfail 3
fi
exec "$bin/python" -m pytest "$@"
