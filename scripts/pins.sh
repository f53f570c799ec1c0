#!/usr/bin/env bash
# Writes the lists of requirements/ that scripts/setup.sh installs, hashes included, from what pyproject.toml names.
#
#   bash scripts/pins.sh [--upgrade | --upgrade-package NAME]
#
# A release that is in a list stays where it still fits; the options, which are uv's, take newer ones. Run the tests
# afterwards. Made for Linux and x86-64; the hashes are those of every platform's wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
venv="${MEGATRON_RETOOL_VENV:-.venv}"
if [[ ! -x "$venv/bin/uv" ]]; then
  echo "pins: no uv in $venv: run bash scripts/setup.sh first" >&2
  exit 1
fi
source scripts/package_index.sh
set_package_index "$venv"
unset UV_INDEX UV_FIND_LINKS # of one index, or a release that another has for other Pythons alone would be taken

options=(--quiet --python-version 3.12 --python-platform x86_64-manylinux_2_34 --generate-hashes --no-annotate "$@")
export UV_CUSTOM_COMPILE_COMMAND="bash scripts/pins.sh"
compile() { # name of the list, arguments
  "$venv/bin/uv" pip compile "${options[@]}" --output-file "requirements/$1.txt" "${@:2}" >/dev/null
  echo "requirements/$1.txt"
}
tools=(--extra mcp --extra tinker --extra verifiers --extra test)
compile gpu pyproject.toml --extra gpu "${tools[@]}"
compile cpu pyproject.toml --extra cpu "${tools[@]}" --constraint requirements/gpu.txt \
  --override requirements/left_out_on_cpu.txt
compile gpu-torch --group gpu-torch --constraint requirements/gpu.txt
compile docs_only --group docs_only --constraint requirements/gpu.txt
for group in gpu-build sglang_only transformer_engine_only cookbook_only installer; do
  compile "$group" --group "$group" --no-deps
done
compile trl --group trl
# An index may have a build for CPUs, whose hash is another.
sed -n 's/^    "\(torch==.*\)",$/\1/p' pyproject.toml >requirements/cpu-torch.txt
