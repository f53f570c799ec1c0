"""rollout.engine.backend: the door to engines, and what is said of those that do not fit it."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from megatron_retool.config import load_config
from megatron_retool.registry import ExtensionError
from sglang_rollout.engine.configured import check_engine, make_engine
from sglang_rollout.engine.sglang_engine import SGLangEngine
from sglang_rollout.engine.transformers_engine import TransformersEngine

OWN = """
from sglang_rollout.engine.sglang_engine import SGLangEngine
from sglang_rollout.engine.client import SGLangClient

class Client(SGLangClient):
    pass

class Engine(SGLangEngine):
    def __init__(self, config, greeting="hello"):
        super().__init__(config)
        self.greeting = greeting

    def client(self, base_url):
        return Client(base_url)
"""


def config_with(tmp_path, source: str, *overrides: str):
    """A configuration whose engine is ``Engine`` of OWN with ``source`` after it."""
    file = tmp_path / "own_engine.py"
    file.write_text(OWN + textwrap.dedent(source))
    return load_config(None, [f"rollout.engine.backend={file}:Engine", f"trainer.runs_dir={tmp_path}", *overrides])


@pytest.mark.parametrize(("name", "kind"), [("sglang", SGLangEngine), ("transformers", TransformersEngine)])
def test_the_engines_that_are_built_in_fit(name, kind):
    config = load_config(None, [f"rollout.engine.backend={name}"])
    check_engine(config)
    assert type(make_engine(config)) is kind


def test_an_engine_that_cannot_record_is_refused_where_it_is_to(tmp_path):
    settings = ["trainer.profiler.tool=torch", "trainer.profiler.steps=[1]", "trainer.profiler.engines=true"]
    check_engine(load_config(None, settings))
    with pytest.raises(ExtensionError, match=r"profiler\.engines=true with .*transformers.* has no 'start_profile'"):
        check_engine(load_config(None, [*settings, "rollout.engine.backend=transformers"]))


def test_an_engine_that_loads_no_adapters_is_refused_where_it_is_to(tmp_path):
    settings = "rollout.engine.adapters.max_rank=8"
    check_engine(load_config(None, [settings]))
    with pytest.raises(ExtensionError, match=r"adapters\.max_rank above 0 with .*load_adapter is no method"):
        check_engine(config_with(tmp_path, "Client.load_adapter = None", settings))


def test_anybodys_engine_with_its_own_settings(tmp_path):
    config = config_with(tmp_path, "", "rollout.engine.backend_kwargs={greeting: good day}")
    check_engine(config)
    engine: Any = make_engine(config)
    assert engine.greeting == "good day"
    assert type(make_engine(config).client("http://e")).__name__ == "Client"


@pytest.mark.parametrize(
    ("source", "overrides", "words"),
    [
        ("", ["rollout.engine.backend=sglan"], "'sglan' is not one of sglang, transformers.*nearest is sglang"),
        ("", ["rollout.engine.backend=no_such_module:Engine"], "no module no_such_module"),
        ("", ["rollout.engine.backend_kwargs={greting: x}"], "backend_kwargs.greting.*no parameter.*greeting"),
        ("raise RuntimeError('unlicensed')", [], "importing .*RuntimeError: unlicensed"),
        ("def Engine(config): return 3", [], "int has no 'server': define what .*engine.base.Engine lists"),
        ("class Engine:\n    def __init__(self): pass", [], "takes 0 argument.*is called with 1: config"),
        ("Engine.__init__ = lambda self, config: 1 / 0", [], "raised ZeroDivisionError when it was made"),
        ("Engine.server = lambda self, index: None", [], r"Engine.server\(index\) cannot be called as server"),
        ("Engine.client = lambda self, base_url: object()", [], r"client\(…\) returned: object has no 'base_url'"),
        ("Engine.client = lambda self, base_url: [][0]", [], r"its client\(…\) raised IndexError"),
        ("Client.abort = None", [], "Client.abort is no method"),
        ("Client.abort = lambda self, request_id: None", [], "Client.abort must be a coroutine"),
        (
            "async def generate(self, ids): ...\nClient.generate = generate",
            [],
            r"Client.generate\(ids\) cannot be called as generate\(self, request.*on_start",
        ),
        ("Engine.weight_sync = lambda self, base_urls: None", [], r"weight_sync\(…\) returned: NoneType has no"),
    ],
)
def test_what_does_not_fit_is_one_message_that_names_the_key(tmp_path, source, overrides, words):
    with pytest.raises(ExtensionError, match=words) as error:
        check_engine(config_with(tmp_path, source, *overrides))
    assert str(error.value).startswith("rollout.engine.backend")
