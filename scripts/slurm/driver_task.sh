#!/usr/bin/env bash
# The driver of a run, or one rank of a torch.distributed job where MASTER_ADDR is set: driver_task.sh COMMAND…
# Run by srun, inside the container if there is one. Leaves its process id where common.sh finds it for signals.
set -euo pipefail
# shellcheck source=scripts/usage.sh
[[ "${1:-}" != -* ]] || source "$(dirname "${BASH_SOURCE[0]}")/../usage.sh"
# shellcheck source=scripts/slurm/node_environment.sh
source "$MEGATRON_RETOOL_ROOT/scripts/slurm/node_environment.sh" "$MEGATRON_RETOOL_HEAD_ADDRESS"
REQUEUE_CODE=85 # the driver's "checkpointed as asked, there is more to do"
if [[ -n "${MASTER_ADDR:-}" ]]; then
  export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
fi
set -m # a process group of its own, so that nothing of it is left when it ends
"$@" &
pid=$!
echo "$pid" >"$MEGATRON_RETOOL_CONTROL_DIR/driver.$SLURM_PROCID.$SLURMD_NODENAME"
code=0
wait "$pid" || code=$?
# What the driver left behind would hold the step's output open, and srun waits for that.
kill -KILL -- "-$pid" 2>/dev/null || true
if ((code == REQUEUE_CODE)); then
  # As an exit code it would make srun kill the ranks that are still closing their files.
  touch "$MEGATRON_RETOOL_CONTROL_DIR/requeue"
  exit 0
fi
# The first failure is the one to report: srun ends the other ranks, and returns the highest exit code of all.
((code == 0)) || (set -o noclobber && echo "$code rank $SLURM_PROCID on $SLURMD_NODENAME" >"$MEGATRON_RETOOL_CONTROL_DIR/failed") \
  2>/dev/null || true
exit "$code"
