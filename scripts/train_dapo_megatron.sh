#!/usr/bin/env bash
# DAPO with Geo-MIS on a Megatron-Core learner and SGLang engines.
#   bash scripts/train_dapo_megatron.sh [--config FILE] [dotted.key=value …]
# Without arguments: the whole demo (data, tiny model, SFT, conversion, RL, evaluation, export, report) on any machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec "${MEGATRON_RETOOL_VENV:-.venv}/bin/python" -m megatron_retool pipeline "$@"
