"""External weights: files that clients download with nothing but a URL, encrypted where the client asks for it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_retool.target_sequences import RequestRefused
from sglang_rollout.gateway.errors import ApiError
from untrusted import quoted

URL_SECONDS = 3600.0
_MOST_TOKENS = 4096


def encrypt_files(directory: Path, recipients: Sequence[str]) -> None:
    """Replace every file by one that age has encrypted, NAME.age.

    Raises:
        RequestRefused: a recipient is no key, or the server has no pyrage.
    """
    try:
        import pyrage
    except ImportError:
        raise RequestRefused(
            "age_encryption_recipients: the server cannot encrypt: install pyrage beside it (pip install pyrage), or "
            "save external weights without recipients"
        ) from None
    keys = []
    for each in recipients:
        kind = pyrage.ssh if each.startswith("ssh-") else pyrage.x25519
        try:
            keys.append(kind.Recipient.from_str(each))
        except Exception as error:
            raise RequestRefused(f"age_encryption_recipients: {quoted(each, 80)} is no key of age: {error}") from error
    for file in [each for each in directory.iterdir() if each.is_file()]:
        pyrage.encrypt_file(str(file), f"{file}.age", keys)
        file.unlink()


class DownloadUrls:
    """Directories that may be read for a while by whoever knows a token.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: dict[str, tuple[Path, float]] = {}

    def open(self, directory: Path) -> str:
        """A new token for ``directory``."""
        now = self._clock()
        self._tokens = {token: result for token, result in self._tokens.items() if result[1] > now}
        while len(self._tokens) >= _MOST_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        token = secrets.token_urlsafe(24)
        self._tokens[token] = directory, now + URL_SECONDS
        return token

    def find(self, token: str, name: str) -> Path:
        """A file of the token's directory.

        Raises:
            ApiError: 404, the token is unknown or too old, or there is no such file.
        """
        directory, end = self._tokens.get(token, (None, 0.0))
        if directory is not None and end > self._clock():
            for file in directory.iterdir() if directory.is_dir() else ():
                if file.name == name and file.is_file():
                    return file
        raise ApiError(404, "there is no such file, or its URL has expired: ask for the URLs again", code="not_found")
