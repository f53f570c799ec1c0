"""The learner: a Megatron-Core model, its optimizer, and the steps that train it. Entry point: ``learner.Learner``."""

import warnings

# Megatron-Core says this in every module that looks for them; precision.describe_acceleration says it once.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
