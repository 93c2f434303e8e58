"""Codecs of collectives: what crosses a link in fewer bytes, exactly or with the loss kept for the next step."""
