"""How is one operation made fast? Plain references, and beside each the forms that beat it on some device and shape."""
