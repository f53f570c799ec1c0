#!/usr/bin/env bash
# Nodes with Ray running on them and a shell on the first, to try things by hand:
#
#   bash scripts/slurm/interactive.sh --config FILE --nodes N [salloc options] [dotted.key=value …] [-- COMMAND …]
#
# Options are those of submit.sh. In the shell, `python -m megatron_retool train --config FILE cluster.ray_address=auto
# cluster.nodes=N` joins the Ray that is up; leaving the shell ends Ray and gives the nodes back. With `-- COMMAND` that
# command runs in place of the shell.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/usage.sh
source "$here/../usage.sh"
# shellcheck source=scripts/slurm/common.sh
source "$here/common.sh"
load_settings "$here/../.."

on_head=""
if [[ "${1:-}" == --on-head ]]; then
  on_head=1
  shift
fi
parse_submission "$@"
[[ -z "$SFT$DRY_RUN" ]] || die "--sft and --dry-run belong to submit.sh"

if [[ -z "$on_head" ]]; then
  check_submission
  pty=()
  [[ ! -t 0 ]] || pty=(--pty)
  # salloc runs its command where it was called, which may be a login node: srun takes it to the first node.
  exec salloc "${ALLOCATION_OPTIONS[@]}" --ntasks-per-node=1 --exclusive --mem=0 --job-name="${EXPERIMENT//\//.}" \
    "${SLURM_OPTIONS[@]}" srun --overlap --nodes=1 --ntasks=1 --relative=0 --mem=0 --cpu-bind=none "${pty[@]}" \
    bash "$here/interactive.sh" --on-head --config "$CONFIG" --nodes "$SUBMIT_NODES" "${OVERRIDES[@]}" -- "${COMMAND[@]}"
fi

prepare_job
trap clean_up EXIT
start_ray
wait_for_ray || die "Ray did not start"
log "Ray is up: cluster.ray_address=auto cluster.nodes=${#NODES[@]} cluster.gpus_per_node=$GPUS_PER_NODE"
((${#COMMAND[@]})) || COMMAND=(bash)
if [[ -n "$MEGATRON_RETOOL_CONTAINER" ]]; then
  pty=()
  [[ ! -t 0 ]] || pty=(--pty)
  build_step "$HEAD" 1 "${pty[@]}"
else
  STEP=(env PATH="$MEGATRON_RETOOL_VENV/bin:$PATH")
fi
"${STEP[@]}" "${COMMAND[@]}"
