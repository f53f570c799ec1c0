#!/usr/bin/env bash
# The documentation as a site with search, from local files only.
#   bash scripts/docs.sh            serves it on http://localhost:8000 and follows changes
#   bash scripts/docs.sh build      writes it to runs/site
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
bash scripts/setup.sh
venv="${MEGATRON_RETOOL_VENV:-.venv}"
if [[ ! -d "$venv/docs_only" ]]; then # the GPU environment does not have it
  "$venv/bin/python" -m pip install --quiet --target "$venv/docs_only" -r requirements/docs_only.txt
fi
export PYTHONPATH="$venv/docs_only"
if [[ "${1:-}" == build ]]; then
  exec "$venv/bin/python" -m zensical build --strict
fi
exec "$venv/bin/python" -m zensical serve
