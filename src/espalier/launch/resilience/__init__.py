"""What if something breaks? Who hangs or is slow, whether a restart helps, and where the next rank begins."""
