# shellcheck shell=bash
# What every process of a run needs on its node; sourced by ray_node.sh and driver_task.sh, with the address of the head
# node as argument. Sets own_address, interface and spare_port.
# shellcheck disable=SC2034
# shellcheck source=scripts/usage.sh
[[ "${BASH_SOURCE[0]}" != "$0" ]] || source "$(dirname "$0")/../usage.sh" # read by hand, as in `bash FILE --help`
cd "$MEGATRON_RETOOL_ROOT" || exit 1
export PYTHONPATH="$MEGATRON_RETOOL_ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# shellcheck source=scripts/slurm/nccl.env
source "$MEGATRON_RETOOL_NCCL_ENV"
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
ulimit -l unlimited 2>/dev/null || true # InfiniBand registers memory

network_flags=()
[[ -z "${MEGATRON_RETOOL_INTERFACE:-}" ]] || network_flags=(--interface "$MEGATRON_RETOOL_INTERFACE")
network="$("$MEGATRON_RETOOL_PYTHON" -m megatron_retool.cluster.network "${network_flags[@]}" "$1")" || exit 1
read -r own_address interface spare_port <<<"$network"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"
