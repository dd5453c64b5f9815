"""Costs of mechanisms and models: time, memory, multiply-accumulates and parameters."""
