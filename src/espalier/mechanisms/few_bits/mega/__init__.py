"""What do few bits save? Packages of codes of mixed widths, condensed edges, and a simulator of accelerators."""
