"""verl's configurations in our words: read (source), translated (rules, convert), written (command)."""
