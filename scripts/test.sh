#!/usr/bin/env bash
# Installs what is missing, then linting, type checks and the tests (under 20 minutes on two cores).
#
#   bash scripts/test.sh [--all | --most | pytest arguments]
#
#   bash scripts/test.sh                             quick tests
#   bash scripts/test.sh --most                      slow ones too, and those with published weights; .ci/run calls it
#   bash scripts/test.sh --all                       rare ones too (hours): before a release
#   bash scripts/test.sh tests/learner -k parity     a part, without linting and type checks
#
# `.venv/bin/pytest --help` has pytest's arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
bash scripts/setup.sh
bin="${MEGATRON_RETOOL_VENV:-.venv}/bin"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONDONTWRITEBYTECODE=  # hundreds of processes import what one has compiled
# Weights are downloaded only where the expression names them.
case "$*" in
  "") which="not slow and not rare and not real_weights" ;;
  --most) which="(real_weights or not real_weights) and not rare" ;;
  --all) which="real_weights or not real_weights" ;;
  *) exec "$bin/python" -m pytest "$@" ;;
esac
"$bin/ruff" check .
"$bin/ruff" format --check --quiet .
"$bin/mypy"
"$bin/lint-imports" --no-logo
"$bin/vulture"
# Two files at a time. Whole runs and jobs, which keep more than a core busy, come last, beside one another.
whole=(tests/end_to_end tests/slurm)
status=0
"$bin/python" -m pytest -m "$which" -n 2 --dist loadfile "${whole[@]/#/--ignore=}" || status=$?
[[ "$status" -le 1 ]] || exit "$status"
"$bin/python" -m pytest -m "$which" -n 2 --dist loadfile "${whole[@]}" || status=$?
[[ "$status" -eq 1 ]] || exit "$status"
# A deadline that is missed beside other tests shows nothing about the code; a fault also fails by itself.
echo "test.sh: testing what failed again, one at a time" >&2
exec "$bin/python" -m pytest -m "$which" --last-failed --last-failed-no-failures none --maxfail 3
