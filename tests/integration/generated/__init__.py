"""Trainings that are written at random, each with one silent fault or with none."""
