"""One rank under torchrun: ``-m megatron_retool.sft runs/<name>/config.yaml``."""

import sys

from megatron_retool.sft.launch import worker

sys.exit(worker(sys.argv[1]))
