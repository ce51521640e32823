"""docs/reference/recorded-facts.md is that of the tables."""

from tests.docs.recorded_facts import PAGE, page


def test_the_page_is_that_of_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(), "run python -m tests.docs.recorded_facts"


def test_a_fact_of_each_kind() -> None:
    lines = {line.partition(" | ")[0]: line for line in page().splitlines()}
    assert "used" in lines["| `num_attention_heads`"]
    assert "compared" in lines["| `dilations`"] and "used" not in lines["| `dilations`"]
    assert "no effect" in lines["| `out_indices`"]
