from megatron_retool.from_verl.page import PAGE, page


def test_the_page_has_the_table_as_it_is():
    """python -m megatron_retool.from_verl.page writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
