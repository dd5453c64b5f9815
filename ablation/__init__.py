"""Sweeps: files of settings, their runs, and the tables and figures of the results."""
