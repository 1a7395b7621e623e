"""Whole worlds of real processes with scripted ranks, asked over HTTP."""
