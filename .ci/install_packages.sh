#!/usr/bin/env bash
# What the tests need beside Python, so that none of them is skipped: Slurm and munge (tests/slurm start daemons of their
# own), bubblewrap (an isolation of the sandbox), chromium (tests/viewer), shellcheck, and with npm the agents that
# tests/sglang_rollout/gateway/test_installed_clients.py runs, in AGENT_CLIENTS_DIR. Nothing is configured or left
# running. Does nothing where all of it is installed; packages need Debian and root.
set -euo pipefail
# shellcheck source=scripts/usage.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/usage.sh"
export PATH="$PATH:/usr/sbin:/sbin"

clients="${AGENT_CLIENTS_DIR:-$HOME/.cache/megatron-retool/agent_clients}"
pinned=(@anthropic-ai/claude-code@2.1.332 @openai/codex@0.169.0 @qwen-code/qwen-code@0.24.4 opencode-ai@1.18.33)
if [[ "$(cat "$clients/installed" 2>/dev/null)" != "${pinned[*]}" ]]; then
  if ! command -v npm >/dev/null; then
    echo "install_packages: no npm: the tests of installed agents are skipped" >&2
  elif timeout 300 npm install --no-audit --no-fund --loglevel=error --prefix "$clients" "${pinned[@]}" >/dev/null; then
    echo "${pinned[*]}" >"$clients/installed"
  else
    echo "install_packages: npm could not install ${pinned[*]}: the tests of what is missing are skipped" >&2
  fi
fi

if type -P slurmctld slurmd munged ip unshare setpriv bwrap chromium shellcheck >/dev/null; then # all of them
  exit 0
fi
if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "install_packages: needs root and apt-get; what is missing is said where a test is skipped" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends \
  slurm-wlm slurm-wlm-basic-plugins munge iproute2 procps util-linux bubblewrap chromium shellcheck >/dev/null
