"""The model that a server of the Tinker protocol has, and what a client may ask of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_retool.tinker.requests import LoraSettings
from sglang_rollout.gateway.errors import invalid
from untrusted import quoted


@dataclass(frozen=True)
class ServedModel:
    """
    Attributes:
        names: by which clients may call it.
        tokenizer: what AutoTokenizer loads for it: a directory or a hub id.
        vocabulary: token ids lie below it.
        context: tokens of a prompt with its sample.
        longest_sequence: tokens of a sequence that is learned.
        most_rank: of a run's adapter.
        adapts_attention, adapts_mlp: which layers adapters have, of every run alike.
        finds_texts: samples can be ended at a text.
    """

    names: tuple[str, ...]
    tokenizer: str
    vocabulary: int
    context: int
    longest_sequence: int
    most_rank: int
    adapts_attention: bool = True
    adapts_mlp: bool = True
    finds_texts: bool = True

    def check_name(self, name: str) -> None:
        """
        Raises:
            ApiError: 400, the model has another name.
        """
        if name not in self.names:
            raise invalid(
                "base_model",
                f"{quoted(name)} is not served: this server has {', '.join(self.names)} (tinker.names adds names)",
            )

    def check_lora(self, lora: LoraSettings) -> None:
        """
        Raises:
            ApiError: 400, the server's adapters are others.
        """
        if lora.rank > self.most_rank:
            raise invalid(
                "lora_config.rank",
                f"{lora.rank} is above the server's {self.most_rank} (learner.lora.rank): ask for less",
            )
        for name, asked, has in (
            ("train_attn", lora.train_attn, self.adapts_attention),
            ("train_mlp", lora.train_mlp, self.adapts_mlp),
        ):
            if asked != has:
                raise invalid(
                    f"lora_config.{name}",
                    f"expected {str(has).lower()}: all runs adapt the layers that the server was started with "
                    "(learner.lora.targets)",
                )
