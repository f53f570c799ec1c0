"""Random ragged batches, and their padded twins for reference implementations."""

import torch


def ragged(lengths, mask_share=0.7, seed=0):
    """(sequence_ids int64 [T], loss_mask bool [T]) for sequences of ``lengths``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.as_tensor(lengths)
    sequence_ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    return sequence_ids, torch.rand(len(sequence_ids), generator=generator) < mask_share


def pad(flat, lengths, fill=0.0):
    """[T] -> [N, longest]."""
    rows = torch.split(flat, list(lengths))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def unpad(padded, lengths):
    """[N, longest] -> [T]."""
    return torch.cat([row[:n] for row, n in zip(padded, lengths, strict=True)])
