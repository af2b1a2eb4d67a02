"""Doing it: stages that compute, and what runs them."""
