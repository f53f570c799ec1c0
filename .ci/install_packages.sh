#!/usr/bin/env bash
# What the tests need beside Python, so that none of them is skipped: Slurm and munge (tests/slurm start daemons of their
# own), bubblewrap (an isolation of the sandbox), chromium (tests/viewer) and shellcheck. Nothing is configured or left
# running. Does nothing where all of it is installed, or where this is no Debian with root.
set -euo pipefail
# shellcheck source=scripts/usage.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/usage.sh"
export PATH="$PATH:/usr/sbin:/sbin"
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
