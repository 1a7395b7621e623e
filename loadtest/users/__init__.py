"""Locust users for the mix that a platform sees, against any OpenAI-compatible server."""
