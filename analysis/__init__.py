"""Analyses of attention in a trained model, one file per question of analyze.py."""
