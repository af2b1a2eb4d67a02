"""Deciding: what every plan costs and holds, and which is the fastest that fits. No torch."""
