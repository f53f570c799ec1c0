"""Which key ``megatron-retool serve`` asks its callers for."""

from __future__ import annotations

import pytest

from megatron_retool.commands.serve import key_of


@pytest.mark.parametrize(
    ("option", "variable", "key"),
    [("k", "v", "k"), (None, "v", "v"), (None, None, None), ("", "v", None), (None, "", None)],
)
def test_the_option_comes_before_the_variable(option: str | None, variable: str | None, key: str | None) -> None:
    assert key_of(option, variable, private=True)[0] == key


@pytest.mark.parametrize(("option", "variable"), [(None, None), ("", None), ("", "v"), (None, "")])
def test_an_address_that_others_reach_always_has_a_key(option: str | None, variable: str | None) -> None:
    key, shown = key_of(option, variable, private=False)
    assert key == shown, "the terminal shows a key that was made"
    assert key is not None
    assert len(key) > 20


def test_a_given_key_is_not_shown() -> None:
    assert "secret" not in key_of("secret", None, private=False)[1]
    assert "secret" not in key_of(None, "secret", private=False)[1]
