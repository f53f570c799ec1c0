"""Files that clients download by URL: encrypted for them, for an hour."""

from __future__ import annotations

import pytest

from megatron_retool.target_sequences import RequestRefused
from megatron_retool.tinker import external_weights
from megatron_retool.tinker.external_weights import DownloadUrls, encrypt_files
from sglang_rollout.gateway.errors import ApiError


def test_files_are_encrypted_for_their_recipients(tmp_path):
    pyrage = pytest.importorskip("pyrage", reason="pyrage is not installed (pyproject.toml, extra tinker)")
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    key = pyrage.x25519.Identity.generate()
    encrypt_files(tmp_path, [str(key.to_public())])
    (file,) = tmp_path.iterdir()
    assert file.name == "adapter.safetensors.age"
    assert pyrage.decrypt(file.read_bytes(), [key]) == b"weights"
    with pytest.raises(RequestRefused, match="age_encryption_recipients: 'nobody' is no key of age"):
        encrypt_files(tmp_path, ["nobody"])


def test_a_url_names_files_of_its_directory_for_an_hour(tmp_path):
    now = [0.0]
    urls = DownloadUrls(lambda: now[0])
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_text("a")
    (tmp_path / "secret").write_text("s")
    token = urls.open(tmp_path / "kept")
    assert urls.find(token, "a") == tmp_path / "kept" / "a"
    for wrong in ((token, "../secret"), (token, "b"), ("other", "a")):
        with pytest.raises(ApiError):
            urls.find(*wrong)
    now[0] = external_weights.URL_SECONDS + 1
    with pytest.raises(ApiError, match="its URL has expired"):
        urls.find(token, "a")
