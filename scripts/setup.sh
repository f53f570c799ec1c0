#!/usr/bin/env bash
# Makes .venv with everything pinned in requirements/ (by scripts/pins.sh). Does nothing when it is already there and up
# to date.
#
#   bash scripts/setup.sh [--gpu]
#
#   --gpu    with CUDA, Transformer Engine and SGLang's kernels. Without it: what the environment was made for before, or
#            for a new one what this host has
#
# MEGATRON_RETOOL_VENV is another place for the environment, and MEGATRON_RETOOL_PYTHON the version that it is made with,
# 3.12 or 3.13 (default: what is found first, in this order). Afterwards `source .venv/bin/activate` puts python,
# megatron-retool and tensorboard on PATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
source scripts/package_index.sh

venv="${MEGATRON_RETOOL_VENV:-.venv}"
stamp="$venv/.installed"
if [[ $# -gt 0 && "$*" != --gpu ]]; then
  echo "setup: unknown arguments $*: only --gpu is known (setup.sh --help)" >&2
  exit 1
fi
versions="${MEGATRON_RETOOL_PYTHON:-3.12 3.13}"
if [[ ! "$versions" =~ ^(3\.12|3\.13|3\.12\ 3\.13)$ ]]; then
  echo "setup: MEGATRON_RETOOL_PYTHON=$versions: it can be 3.12 or 3.13" >&2
  exit 1
fi
flavour=cpu
if [[ "${1:-}" == --gpu ]] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }; then
  flavour=gpu
elif [[ -f "$stamp" ]]; then
  read -r flavour _ <"$stamp" # a login node must not put the CPU's packages over the GPU nodes'
fi
lists=("requirements/$flavour-torch.txt" "requirements/$flavour.txt" requirements/sglang_only.txt)
if [[ "$flavour" == gpu ]]; then
  lists+=(requirements/gpu-build.txt)
else
  lists+=(requirements/{installer,transformer_engine_only,cookbook_only,docs_only}.txt)
fi
want="$flavour $(cat "${lists[@]}" pyproject.toml | sha256sum | cut -c1-16) $PWD"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$want" ]]; then
  exit 0
fi

usable="import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] not in '$versions'.split())"
if [[ -x "$venv/bin/python" ]] && ! "$venv/bin/python" -c "$usable" 2>/dev/null; then
  echo "setup: $venv was made with $("$venv/bin/python" -V 2>&1 || echo 'a Python that is gone'), and this needs" \
    "Python ${versions/ / or }: rm -r $venv, then run this again" >&2
  exit 1
fi

# Ubuntu 24.04 and NVIDIA's and SGLang's images have 3.12; where PATH has none, pyenv or uv may.
find_python() {
  local candidate pyenv="${PYENV_ROOT:-${HOME:-}/.pyenv}" program
  program="$(command -v pyenv || true)" # whose place tells where another user's HOME does not
  for candidate in python3.12 python3.13 python3 python \
    "$pyenv"/versions/3.12.*/bin/python3 "$pyenv"/versions/3.13.*/bin/python3 \
    "${program%/bin/pyenv}"/versions/3.12.*/bin/python3 "${program%/bin/pyenv}"/versions/3.13.*/bin/python3 "$@"; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$usable" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}
# uv may download one, unless its settings forbid it (UV_PYTHON_DOWNLOADS=never).
python_of_uv() {
  command -v uv >/dev/null 2>&1 || return 0
  local version
  for version in $versions; do
    uv python find --no-project "$version" 2>/dev/null && return
  done
  { uv python install --quiet "${versions% *}" >&2 && uv python find --no-project "${versions% *}"; } || true
}
python="$(find_python)"
[[ -n "$python" || -x "$venv/bin/python" ]] || python="$(find_python "$(python_of_uv)")"
if [[ -z "$python" && ! -x "$venv/bin/python" ]]; then
  echo "setup: Python ${versions/ / or } is needed and was not found: install it (python${versions% *} with its venv" \
    "package, conda, or uv python install ${versions% *})" >&2
  exit 1
fi

if [[ "$flavour" == gpu ]]; then
  "${python:-$venv/bin/python}" megatron_retool/gpu_host.py || exit 1
fi

echo "setup: installing the $flavour requirements into $venv (a few minutes, once)"
# pip would compile one file after another, which takes longer than all the rest.
pip_flags=(--quiet --disable-pip-version-check --no-input --no-compile)
[[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip install ${pip_flags[*]}"

# uv unpacks on all cores, and pip on one.
get_uv() {
  if ! $pip --no-deps -r requirements/installer.txt; then
    echo "setup: continuing with pip, which takes longer" >&2
    return
  fi
  set_package_index "$venv"
}

# What uv cannot install, pip tries: an index may want something that uv does not know.
install() {
  if [[ -x "$venv/bin/uv" ]] && "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; then
    return
  fi
  $pip "$@"
}

if [[ "$flavour" == gpu ]]; then
  # The lists are complete. With dependencies, an older pip (23.2, of Python 3.12.1) refuses one that names an extra.
  $pip --no-deps -r requirements/gpu-torch.txt
  # Transformer Engine compiles its torch extension against the torch that is already there and the CUDA headers of
  # Python packages, whatever toolkit the host has; it would first ask a public host for a wheel.
  $pip --no-deps -r requirements/gpu-build.txt
  export NVTE_FRAMEWORK="${NVTE_FRAMEWORK:-pytorch}" NVTE_BUILD_USE_NVIDIA_WHEELS="${NVTE_BUILD_USE_NVIDIA_WHEELS:-1}"
  export NVTE_PYTORCH_FORCE_BUILD="${NVTE_PYTORCH_FORCE_BUILD:-TRUE}"
  $pip --no-deps --no-build-isolation -r requirements/gpu.txt
  # Neither needs a GPU to be imported. torch first: it brings the CUDA libraries that the other looks for.
  "$venv/bin/python" -c 'import torch, transformer_engine.pytorch'
else
  # torchvision breaks transformers' imports where it lacks its operators: only SGLang's server process gets to see it.
  # Megatron-Core takes other ways wherever it can import Transformer Engine: only tests that ask for it get to see it.
  # The cookbook of Tinker runs in processes of its own.
  get_uv
  export NVTE_PROJECT_BUILDING=1
  install -r requirements/cpu-torch.txt
  # The list is complete: --no-deps keeps SGLang's CUDA packages out.
  install --no-deps -r requirements/cpu.txt
  for name in sglang_only transformer_engine_only cookbook_only docs_only; do
    install --no-deps --upgrade --target "$venv/$name" -r "requirements/$name.txt"
  done
fi
install --no-deps --no-build-isolation --editable .
# On all cores, without what no run imports, two fifths of all. Some packages hold templates, which do not compile.
skipped='/(tests?|testing|SelfTest|_vendor)/|/transformers/models/(?!auto/)|/ray/rllib/|/sglang/multimodal_gen/'
skipped+='|/site-packages/(plotly|nltk|matplotlib|fontTools|IPython|playwright|mypyc|pip|setuptools)/'
"$venv/bin/python" -m compileall -q -q -j 0 -x "$skipped" "$venv" >/dev/null 2>&1 || true
echo "$want" > "$stamp"
