#!/usr/bin/env bash
# Slurm and munge for tests/slurm, which start daemons of their own: nothing is configured or left running.
# Does nothing where they are installed, or where this is no Debian with root.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"
if type -P slurmctld slurmd munged ip >/dev/null; then # all of them
  exit 0
fi
if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "install_slurm: needs root and apt-get; tests/slurm will be skipped" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends \
  slurm-wlm slurm-wlm-basic-plugins munge iproute2 procps util-linux shellcheck >/dev/null
