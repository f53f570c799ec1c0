"""Supervised fine-tuning on multi-turn traces with the Megatron-Core learner.

    python -m megatron_retool sft --config configs/sft_qwen2.5_32b.yaml
    torchrun --nproc-per-node 8 -m megatron_retool.sft runs/<name>/config.yaml

The stages of ``sft.stages`` follow one another on the same weights, each with its own data, optimizer and schedule.
Every rank runs the loop (``run.Run``) with the same batches, and the learner takes each rank's share. With
learner.world_size > 1 the command starts the ranks itself, unless torchrun or srun already did.

A run leaves metrics.jsonl, tensorboard/ and checkpoints/global_step_N, and a file COMPLETE once all stages are done.
Steps are counted through all stages. Batches depend only on the seed and the step, so a resumed run repeats none and
skips none. SIGUSR1, to the command or to any rank, ends all ranks after the same step with a checkpoint of it.
"""
