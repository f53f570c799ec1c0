"""Are two mathematical answers equal? Reading (spelling, tokens, grammar), values, units, and the comparison itself."""
