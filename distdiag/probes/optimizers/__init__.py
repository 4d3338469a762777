"""Observe optimizers, their steps and their schedules."""
