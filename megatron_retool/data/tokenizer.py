"""The run's tokenizer: loading it, and whether the model has a row for each of its tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_retool.config import ConfigError, ModelConfig
from megatron_retool.config.model import check_model_path
from untrusted import load_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A tag that transformers adds to Jinja: what the model writes lies between two of them."""
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.vocab", "*.tiktoken", "*.spm")


def load_tokenizer(model: ModelConfig) -> Any:
    """The Hugging Face tokenizer in ``model.tokenizer_path``, or else in ``model.path`` (a directory or a hub id).

    Raises:
        ConfigError: neither is set, the directory holds no tokenizer, or it cannot be loaded.
    """
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    path = model.tokenizer_path or model.path
    if not path:
        raise ConfigError("model.path is not set: give a Hugging Face directory or a hub id")
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{key}={path}: the directory holds no tokenizer ({' or '.join(TOKENIZER_FILES[:2])}); copy the model's "
            "tokenizer there, or set model.tokenizer_path"
        )
    check_model_path(path, key)

    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # without asking whether to
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}={path}: the tokenizer cannot be loaded: {reason}") from error


def check_tokenizer_files(model: ModelConfig) -> None:
    """Make sure that the files of a tokenizer hold a vocabulary, and its chat template is one; transformers is not
    imported.

    From only tokenizer_config.json, transformers makes a tokenizer that knows no text, and says nothing.

    Raises:
        ConfigError: naming the directory or file, and the cure.
    """
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    directory = Path(model.tokenizer_path or model.path)
    if not (directory / "tokenizer_config.json").is_file() and not (directory / "tokenizer.json").is_file():
        return
    if not any(next(directory.glob(pattern), None) for pattern in _VOCABULARIES):
        raise ConfigError(
            f"{key}={directory}: the tokenizer has tokenizer_config.json and no vocabulary (tokenizer.json or "
            "tokenizer.model): copy the model's tokenizer there whole, or set model.tokenizer_path"
        )
    for name, part in (("tokenizer.json", "model"), ("tokenizer_config.json", None)):
        file = directory / name
        if not file.is_file():
            continue
        try:
            result = load_json(file.read_bytes(), finite=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}={directory}: {name} cannot be read: {error}: fetch it again") from None
        if not isinstance(result, dict) or (part is not None and not isinstance(result.get(part), dict)):
            raise ConfigError(f"{key}={directory}: {name} is not that of a tokenizer: fetch it again")
    _check_template(key, directory)


def _check_template(key: str, directory: Path) -> None:
    """Raise ConfigError where the chat template is no Jinja template; what transformers adds to Jinja passes."""
    import jinja2

    file, template = directory / "chat_template.jinja", None
    try:
        template = file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={directory}: {file.name} cannot be read: {error}: fetch it again") from None
    if template is None:
        file = directory / "tokenizer_config.json"
        template = _mapping(file).get("chat_template")
    if not isinstance(template, str):
        return
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{key}={directory}: the chat template in {file.name} is no Jinja template (line {error.lineno}: "
            f"{error.message}): fetch it again, or set model.tokenizer_path"
        ) from None


def check_vocabulary(model: ModelConfig) -> None:
    """Make sure that model.path has a row for each token that its tokenizer makes of text; no package is imported.

    An added token beyond the vocabulary passes where neither the chat template nor a special token's setting uses it:
    Gemma 3's text models have one for images. What cannot be read is left to those who load it.

    Raises:
        ConfigError: a token has no row.
    """
    directory = Path(model.tokenizer_path or model.path)
    config, state = _mapping(Path(model.path) / "config.json"), _mapping(directory / "tokenizer.json")
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, Mapping) else None)
    if type(size) is not int or not state:
        return
    beyond = {token: number for token, number in _token_ids(state.get("model")) if number >= size}
    settings = _mapping(directory / "tokenizer_config.json")
    template = str(settings.get("chat_template"))
    if (directory / "chat_template.jinja").is_file():
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    special = [each.get("content") if isinstance(each, Mapping) else each for each in settings.values()]
    for each in state.get("added_tokens") or []:
        content, number = (each.get("content"), each.get("id")) if isinstance(each, Mapping) else (None, None)
        if type(number) is int and number >= size and isinstance(content, str):
            if content in special or content in template:
                beyond[content] = number
            else:
                beyond.pop(content, None)
    if beyond:
        token = min(beyond, key=lambda each: beyond[each])
        raise ConfigError(
            f"model.path={model.path}: config.json has vocab_size={size}, and the tokenizer in {directory} has "
            f"{len(beyond)} tokens beyond it, such as {token!r:.40} with id {beyond[token]}: the two do not belong "
            "together. Take the model's own tokenizer, or resize its embeddings (resize_token_embeddings)"
        )


def _token_ids(model: Any) -> list[tuple[str, int]]:
    """Of the vocabulary of tokenizer.json, which is a mapping, or of Unigram a list in the order of the ids."""
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        return [(token, number) for token, number in vocabulary.items() if type(number) is int]
    if isinstance(vocabulary, list):
        return [(str(entry[0]), number) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
    return []


def _mapping(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty: there is none, or it is damaged."""
    try:
        result = load_json(path.read_bytes(), finite=False)
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}
