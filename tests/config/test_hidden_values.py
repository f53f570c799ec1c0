"""What a run writes of the secrets in its settings."""

from __future__ import annotations

import pickle
import stat

import pytest

from megatron_retool.config import load_config, save_config
from megatron_retool.config.differences import changed_settings
from megatron_retool.config.hidden_values import HIDDEN

KEY = "a secret of the environment"
LOGGERS = "trainer.logger_kwargs={wandb: {api_key: 'SECRET', entity: ours}}"


def configured(secret: str):
    return load_config(None, [LOGGERS.replace("SECRET", secret)])


def api_key(config) -> str:
    return config.trainer.logger_kwargs["wandb"]["api_key"]


@pytest.mark.parametrize("secret", ["${oc.env:OUR_API_KEY}", "Bearer ${oc.env:OUR_API_KEY}"])
def test_a_secret_of_the_environment_stays_there(secret, tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_API_KEY", KEY)
    config = configured(secret)
    assert api_key(config).endswith(KEY)
    save_config(config, tmp_path / "config.yaml")
    assert KEY not in (tmp_path / "config.yaml").read_text()
    assert api_key(load_config(tmp_path / "config.yaml")) == api_key(config)
    assert changed_settings(tmp_path / "config.yaml", config) == {}
    assert api_key(pickle.loads(pickle.dumps(config))) == api_key(config)
    monkeypatch.delenv("OUR_API_KEY")
    assert KEY not in api_key(load_config(tmp_path / "config.yaml")), "a run is read without its secrets too"


def test_a_secret_that_is_spelled_out_is_hidden(tmp_path):
    config = configured("sk-123")
    save_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "sk-123" not in text and HIDDEN in text and "ours" in text
    assert changed_settings(tmp_path / "config.yaml", config) == {}


@pytest.mark.parametrize("secret", ["sk-123", "${oc.env:OUR_API_KEY}"])
def test_the_private_file_of_a_runs_own_processes_has_them(secret, tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_API_KEY", KEY)
    config = configured(secret)
    save_config(config, tmp_path / "private.yaml", secrets=True)
    assert stat.S_IMODE((tmp_path / "private.yaml").stat().st_mode) == 0o600
    monkeypatch.delenv("OUR_API_KEY")
    assert api_key(load_config(tmp_path / "private.yaml")) == api_key(config)


def test_other_settings_of_the_environment_are_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_PROJECT", "tools")
    save_config(load_config(None, ["trainer.project_name=${oc.env:OUR_PROJECT}"]), tmp_path / "config.yaml")
    assert "project_name: tools" in (tmp_path / "config.yaml").read_text()
