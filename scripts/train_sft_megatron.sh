#!/usr/bin/env bash
# Multi-turn supervised fine-tuning on the Megatron-Core learner: scripts/setup.sh, then `megatron-retool sft`.
#
#   bash scripts/train_sft_megatron.sh [--config FILE] [dotted.key=value …]
#
# The same command continues where a run was stopped. Everything a run leaves is in runs/<trainer.experiment_name>.
#
#   bash scripts/train_sft_megatron.sh --config configs/sft_qwen2.5_32b.yaml
#
# Settings: the files of configs/ as examples, `.venv/bin/megatron-retool sft --help` for all of their names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
bash scripts/setup.sh
exec "${MEGATRON_RETOOL_VENV:-.venv}/bin/python" -m megatron_retool sft "$@"
