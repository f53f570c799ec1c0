#!/usr/bin/env bash
# The documentation as a site with search, from local files alone.
#   bash scripts/docs.sh            serves it on http://localhost:8000 and follows changes
#   bash scripts/docs.sh build      writes it to runs/site
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
bash scripts/setup.sh
bin="${MEGATRON_RETOOL_VENV:-.venv}/bin"
if [[ ! -x "$bin/zensical" ]]; then # the GPU environment does not have it
  "$bin/python" -m pip install --quiet "$(sed -n 's/^\(zensical==[^ ]*\).*/\1/p' requirements/cpu.txt)"
fi
if [[ "${1:-}" == build ]]; then
  exec "$bin/zensical" build --strict
fi
exec "$bin/zensical" serve
