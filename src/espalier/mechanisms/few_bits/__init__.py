"""How few bits does a value need? Widths and steps of rows of features, learned, and the packed form of the result."""
