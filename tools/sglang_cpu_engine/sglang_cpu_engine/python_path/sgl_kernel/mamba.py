"""What SGLang takes from here by these names for gated delta nets on a CPU."""

from sglang_cpu_engine.delta_nets import convolve_next as causal_conv1d_update_cpu
from sglang_cpu_engine.delta_nets import convolve_prefill as causal_conv1d_fn_cpu
from sglang_cpu_engine.delta_nets import delta_rule as chunk_gated_delta_rule_cpu

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]
