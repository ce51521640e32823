"""Network parts that both engines share."""
