#!/usr/bin/env bash
# Ray on one node of a job: ray_node.sh head | worker | stop. Run by srun on every node, inside the container if there
# is one; common.sh exports what it reads. `head` and `worker` last as long as Ray does on this node.
set -euo pipefail
# shellcheck source=scripts/usage.sh
[[ "${1:-}" != -* ]] || source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"

role="$1"
node="${SLURMD_NODENAME:-$(hostname -s)}"
head_address="${RAY_ADDRESS%:*}"
head_port="${RAY_ADDRESS##*:}"
# Short: the sockets below it must stay within 107 characters, of which Ray takes 64.
local_dir="$MEGATRON_RETOOL_LOCAL_DIR/mr$SLURM_JOB_ID"
pid_file="$local_dir/ray.pid"

die() {
  echo "$node: $*" >&2
  exit 1
}

stop_ray() {
  local pid
  if [[ -f "$pid_file" ]]; then
    pid="$(<"$pid_file")"
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 100); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
  fi
  # `ray stop` ends every Ray of this user on the host, so only where the whole node is this job's.
  if [[ "$MEGATRON_RETOOL_EXCLUSIVE" == 1 ]] && pgrep -u "$(id -u)" -x raylet >/dev/null; then
    "$MEGATRON_RETOOL_RAY" stop --force >/dev/null 2>&1 || true
  fi
}

if [[ "$role" == stop ]]; then
  stop_ray
  rm -rf "$local_dir"
  exit 0
fi

[[ -d "$MEGATRON_RETOOL_CONTROL_DIR" ]] ||
  die "does not see $MEGATRON_RETOOL_CONTROL_DIR: trainer.runs_dir must lie on a file system that all nodes share"
if ((${#local_dir} > 43)); then
  die "MEGATRON_RETOOL_LOCAL_DIR=$MEGATRON_RETOOL_LOCAL_DIR is too long for Ray's sockets: choose a shorter path, like /tmp"
fi
# What an earlier job left behind would be joined, or hold ports and GPU memory.
stop_ray
rm -rf "$local_dir"
mkdir -p "$local_dir"

# shellcheck source=scripts/slurm/node_environment.sh
source "$MEGATRON_RETOOL_ROOT/scripts/slurm/node_environment.sh" "$head_address"
# The driver has ended every actor when Ray is stopped: nothing is left to wait for.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
export RAY_USAGE_STATS_ENABLED=0 RAY_DISABLE_IMPORT_WARNING=1 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0

# Its own limits are 30 s each, too few on a busy node (megatron_retool/cluster/__init__.py sets the same).
export RAY_raylet_start_wait_time_s="${RAY_raylet_start_wait_time_s:-90}"
export RAY_gcs_server_port_wait_time_s="${RAY_gcs_server_port_wait_time_s:-90}"
export RAY_py_gcs_connect_timeout_s="${RAY_py_gcs_connect_timeout_s:-90}"

# A quarter of shared memory, at most 8 GiB: batches are small beside weights, and weights do not pass through Ray.
object_store=$(($(df --output=avail --block-size=1 /dev/shm | tail -1) / 4))
((object_store <= 8 << 30)) || object_store=$((8 << 30))
((object_store >= 80 << 20)) || object_store=$((80 << 20))

# Ports are the kernel's choice, so that jobs that share a node do not meet.
arguments=(
  --node-name="$node" --temp-dir="$local_dir" --object-store-memory="$object_store"
  --min-worker-port=0 --max-worker-port=0 --disable-usage-stats --log-color=false --block
)
if [[ "$role" == head ]]; then
  own_address="$head_address"
  arguments+=(--head --port="$head_port" --ray-client-server-port="$spare_port" --include-dashboard=false)
else
  arguments+=(--address="$RAY_ADDRESS")
  for ((waited = 0; waited < MEGATRON_RETOOL_NODE_TIMEOUT; waited++)); do
    (exec 3<>"/dev/tcp/$head_address/$head_port") 2>/dev/null && break
    sleep 1
  done
fi
arguments+=(--node-ip-address="$own_address")
unset RAY_ADDRESS # the head must not take it for a cluster to join

echo "$node ($own_address on $interface): ray start ${arguments[*]}"
"$MEGATRON_RETOOL_RAY" start "${arguments[@]}" &
echo $! >"$pid_file"
trap stop_ray TERM
code=0
wait $! || code=$?
[[ ! -f "$MEGATRON_RETOOL_CONTROL_DIR/stopping" ]] || exit 0
echo "$code" >"$MEGATRON_RETOOL_CONTROL_DIR/$node.ended"
echo "$node: Ray ended (exit code $code); the raylet's last words:" >&2
tail -n 30 "$local_dir"/session_latest/logs/raylet.err "$local_dir"/session_latest/logs/raylet.out >&2 2>/dev/null || true
exit "$((code ? code : 1))"
