#!/usr/bin/env bash
# DAPO with Geo-MIS on a Megatron-Core learner and SGLang engines: scripts/setup.sh, then `megatron-retool pipeline`.
#
#   bash scripts/train_dapo_megatron.sh [--config FILE] [dotted.key=value …]
#
# Without arguments: the whole demo (data, tiny model, SFT, conversion, RL, evaluation, export, report) on any machine.
# The same command continues where a run was stopped. Everything a run leaves is in runs/<trainer.experiment_name>.
#
#   bash scripts/train_dapo_megatron.sh trainer.experiment_name=mine trainer.total_steps=40
#   bash scripts/train_dapo_megatron.sh --config configs/retool_qwen2.5_32b_8xh200.yaml
#   bash scripts/train_dapo_megatron.sh --quick            every stage of the demo, shortened
#
# Settings: the files of configs/ as examples, `.venv/bin/megatron-retool pipeline --help` for all of their names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
bash scripts/setup.sh
exec "${MEGATRON_RETOOL_VENV:-.venv}/bin/python" -m megatron_retool pipeline "$@"
