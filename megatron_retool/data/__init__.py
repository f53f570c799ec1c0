"""Prompts for reinforcement learning, conversations for supervised fine-tuning, and the demo that makes both."""
