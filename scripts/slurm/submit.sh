#!/usr/bin/env bash
# Checks a configuration against the nodes it asks for, then submits it:
#
#   bash scripts/slurm/submit.sh --config FILE --nodes N [--sft] [--dry-run] [sbatch options] [dotted.key=value …]
#
#   --config FILE        the run's configuration
#   --nodes N            nodes to ask for (default: cluster.nodes of the configuration)
#   --gpus-per-node G    GPUs on each node (default: cluster.gpus_per_node of the configuration)
#   --sft                supervised fine-tuning in place of DAPO
#   --dry-run            check, print the sbatch command, submit nothing
#
# Every other option goes to sbatch as it is, in the form --option=value: --partition=h100, --time=24:00:00,
# --signal=B:USR1@5400. The job's output goes to runs/<name>/logs/slurm_<job>.out. Environment variables that choose
# container, network and limits: `bash scripts/slurm/common.sh --help`.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/usage.sh
source "$here/../usage.sh"
# shellcheck source=scripts/slurm/common.sh
source "$here/common.sh"
load_settings "$here/../.."
parse_submission "$@"
((${#COMMAND[@]} == 0)) || die "${COMMAND[0]}: a command after -- belongs to interactive.sh"

script="$here/train_dapo_megatron.sbatch"
[[ -z "$SFT" ]] || script="$here/train_sft_megatron.sbatch"
check_submission
command=(
  sbatch "${ALLOCATION_OPTIONS[@]}" --job-name="${EXPERIMENT//\//.}" --chdir="$MEGATRON_RETOOL_ROOT"
  --output="$RUN_DIR/logs/slurm_%j.out" "${SLURM_OPTIONS[@]}" "$script" --config "$CONFIG" "${OVERRIDES[@]}"
)
printf '%q ' "${command[@]}"
echo
[[ -n "$DRY_RUN" ]] || { mkdir -p "$RUN_DIR/logs" && exec "${command[@]}"; }
