#!/usr/bin/env bash
# Multi-turn supervised fine-tuning on the Megatron-Core learner.
#   bash scripts/train_sft_megatron.sh [--config FILE] [dotted.key=value …]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec "${MEGATRON_RETOOL_VENV:-.venv}/bin/python" -m megatron_retool sft "$@"
