"""Searches and prices layouts; never imports torch."""
