"""Implementations of parking: one healthy one, and variants of it with one fault each."""
