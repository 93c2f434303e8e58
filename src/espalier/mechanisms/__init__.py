"""Everything that a plan may choose, one folder each, named by what it does."""
