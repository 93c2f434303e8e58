"""Machines of one run: who leads, who follows, how one comes back."""
