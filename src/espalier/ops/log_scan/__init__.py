"""Log scan: what matters of a log of any size (`scan`), found by `keywords`, its lines parsed by `line_labels`."""
