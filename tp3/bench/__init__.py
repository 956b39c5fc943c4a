"""Measuring collectives against the peers that are there: what `tp3 bench` runs."""
